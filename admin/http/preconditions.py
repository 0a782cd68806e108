"""Headers ETag and If-Match, with which a client makes a change only if the object is still in the
state that the client has read.

The check runs under the catalog's lock, in the transaction of the change, so that no other change
can happen in between.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Annotated, TypeVar

import msgspec
from litestar import Response
from litestar.params import HeaderParameter

from store.errors import Invalid
from web.errors import PreconditionFailed

IfMatch = Annotated[
    str | None,
    HeaderParameter(
        name="If-Match",
        max_length=1024,
        description="ETag of what is to be changed; if that is another by now, 412.",
    ),
]

T = TypeVar("T", bound=msgspec.Struct)

_ENTITY_TAG = r'(?:W/)?"[!#-~]*"'
_FORM = re.compile(rf"\*|{_ENTITY_TAG}(?:\s*,\s*{_ENTITY_TAG})*", re.ASCII)


def etag(view: msgspec.Struct) -> str:
    """Returns the ETag of a view. Equal contents have equal ETags on every machine."""
    digest = hashlib.sha256(msgspec.json.encode(view)).digest()
    return f'"{base64.urlsafe_b64encode(digest[:18]).decode()}"'


class Tagged(Response[T]):
    """Response with an ETag."""


def check(if_match: str | None, current: str | None) -> None:
    """Raises PreconditionFailed if `if_match` does not match `current`, the object's ETag.
    `current` is None if the object does not exist. Raises Invalid for a malformed header.

    A weak ETag matches nothing.
    """
    if if_match is None:
        return
    if not _FORM.fullmatch(if_match):
        raise Invalid("If-Match takes an ETag as it was answered", "invalid_etag", "If-Match")
    if current is None or (if_match != "*" and current not in re.findall(_ENTITY_TAG, if_match)):
        raise PreconditionFailed("it has changed since: look again", param="If-Match")
