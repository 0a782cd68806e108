"""Common request and response bodies of the admin plane. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from store.database import FORMS

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


def shown(kind: type[S], record: Any, **others: Any) -> S:
    """Returns a struct of type `kind`. A field that is not in `others` gets the value of the
    record's attribute of the same name, or its default if there is no such attribute."""
    names = [name for name in kind.__struct_fields__ if name not in others]
    return kind(
        **{name: getattr(record, name) for name in names if hasattr(record, name)}, **others
    )


class Page(msgspec.Struct, Generic[T], frozen=True):
    data: list[T]
    has_more: bool
    """Whether there is another page: request it with `after` = the last name (or a key's id)."""
    object: str = "list"


# `$(?!\n)` matches only at the end of a text. In Python, `$` alone also matches before a final
# newline. `\Z` is no alternative, because OpenAPI's patterns are ECMAScript, which lacks it.
_ENTITY = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$(?!\n)"
_ALIAS = r"^(?![0-9]+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"
EntityName = Annotated[str, msgspec.Meta(pattern=_ENTITY)]
AliasName = Annotated[str, msgspec.Meta(pattern=_ALIAS)]
PATTERNS = {_ENTITY: FORMS["entity_name_form"], _ALIAS: FORMS["alias_name_form"]}
"""Description of each pattern in words, for error messages and the OpenAPI document."""


class Deleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "deleted"
