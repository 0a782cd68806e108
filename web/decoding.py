"""Determines which field prevents msgspec from decoding a value, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

MAX_SHOWN = 256
"""Maximum characters of a client's value or field name in a fault."""
_AT = " - at "
_PLACE = re.compile(r"(?:`key` in )?`\$\.?(?P<path>[^`]*)`")
_FIELD = re.compile(
    r"Object (?:contains unknown field `(?P<unknown>[^`]*)`"
    r"|missing required field `(?P<missing>[^`]*)`)"
)
_NO_CHOICE = ("Invalid value ", "Invalid enum value ")
_STEP = re.compile(r"(?:^|\.)(?P<field>[^.\[]+)|\[(?:\.\.\.|\d+)\]")

decoder_of = cache(msgspec.json.Decoder)
"""Returns the JSON decoder of a type. Creates one decoder for each type."""


class Fault(NamedTuple):
    """Fault of a value that cannot be decoded."""

    reason: str
    """Text that says what is wrong, without the place. If the field allows only certain values, the
    text lists them."""
    path: str | None
    """Place of the fault, such as `messages[0].role`. None for the whole value."""
    unknown: str | None
    """Name of the unknown field of the object at `path`."""
    missing: str | None
    """Name of the missing field of the object at `path`."""

    @property
    def field(self) -> str:
        """Path of the wrong, unknown or missing field."""
        return ".".join(filter(None, (self.path, self.unknown, self.missing)))


def find_fault(error: msgspec.ValidationError, kind: Any) -> Fault:
    """Returns the fault that the error reports. `kind` is the type that was decoded."""
    reason, path = str(error), None
    before, _, place = reason.rpartition(_AT)
    if found := _PLACE.fullmatch(place):
        reason, path = before, found["path"]
    names = _FIELD.fullmatch(reason)
    if path is not None and reason.startswith(_NO_CHOICE):
        allowed = ", ".join(repr(value) for value in dict.fromkeys(_allowed(kind, path)))
        reason = reason[:MAX_SHOWN] + (f"; allowed: {allowed}" if allowed else "")
    unknown = names and names["unknown"]
    return Fault(reason, path, unknown and unknown[:MAX_SHOWN], names and names["missing"])


def first_step(path: str) -> str:
    """Returns the first field of a path, such as `messages` for `messages[0].role`."""
    return re.split(r"[.\[]", path)[0]


@lru_cache(maxsize=64)
def members(kind: Any) -> list[inspect.Type]:
    """Returns a union's members, or a list of only the type if it is no union. Removes metadata."""
    return _flat([inspect.type_info(kind)])


def _allowed(kind: Any, path: str) -> Iterable[Any]:
    """Returns the values that the field at the path may have. Returns an empty list if the field's
    type does not list its values."""
    types, last = members(kind), ""
    for step in _STEP.finditer(path):
        last = step["field"] or ""
        parents = types
        types = _flat(each for parent in parents for each in _below(parent, last))
        if not types:
            # The field is the tag that selects a struct of a union.
            structs = (each for each in parents if isinstance(each, inspect.StructType))
            return [each.tag for each in structs if each.tag_field == last]
    return [value for each in types for value in _values(each)]


def _below(parent: inspect.Type, field: str) -> list[inspect.Type]:
    """Returns the types to which one step of the path can lead: the types of a field, of a list's
    items, or of a dictionary's values."""
    match parent:
        case inspect.StructType() if field:
            return [one.type for one in parent.fields if one.encode_name == field]
        case inspect.CollectionType() if not field:
            return [parent.item_type]
        case inspect.DictType() if not field:
            return [parent.value_type]
        case _:
            return []


def _flat(types: Iterable[inspect.Type]) -> list[inspect.Type]:
    """Returns the types, after replacing unions by their members and removing metadata."""
    flat: list[inspect.Type] = []
    for each in types:
        match each:
            case inspect.UnionType():
                flat += _flat(each.types)
            case inspect.Metadata():
                flat += _flat([each.type])
            case _:
                flat.append(each)
    return flat


def _values(each: inspect.Type) -> list[Any]:
    match each:
        case inspect.LiteralType():
            return [*each.values]
        case inspect.EnumType():
            return [member.value for member in each.cls]
        case _:
            return []
