"""Headers ETag and If-Match, with which a client makes a change only if the object is still in the
state that the client has read.

The check runs under the catalog's lock, in the transaction of the change, so that no other change
can happen in between.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Response
from litestar.params import HeaderParameter

from store.database import Connection
from store.errors import Invalid, NotFound
from store.queries import lock_catalog
from web.errors import PreconditionFailed

IfMatch = Annotated[
    str | None,
    HeaderParameter(
        name="If-Match",
        max_length=1024,
        description="ETag of what is to be changed; if that is another by now, 412.",
    ),
]

R = TypeVar("R")
T = TypeVar("T", bound=msgspec.Struct)

_ENTITY_TAG = r'(?:W/)?"[!#-~]*"'
_FORM = re.compile(rf"\*|{_ENTITY_TAG}(?:\s*,\s*{_ENTITY_TAG})*", re.ASCII)


def etag(view: msgspec.Struct) -> str:
    """Returns the ETag of a view. Equal contents have equal ETags on every machine."""
    digest = hashlib.sha256(msgspec.json.encode(view)).digest()
    return f'"{base64.urlsafe_b64encode(digest[:18]).decode()}"'


class Tagged(Response[T]):
    """Response with an ETag."""


def tagged(view: T, tag: str | None = None) -> Tagged[T]:
    """Returns a response with an ETag, which covers the whole view by default. Pass `tag` if the
    ETag must cover only a part of the view."""
    return Tagged(view, headers={"etag": tag or etag(view)})


async def locked(
    connection: Connection,
    if_match: str | None,
    view: Callable[[R], msgspec.Struct],
    find: Callable[[Connection, str], Awaitable[R]],
    reference: str,
) -> R:
    """Locks the catalog, and returns the record that `find` returns. Checks `if_match` against the
    ETag of the record's view. Raises the errors of `find`."""
    await lock_catalog(connection)
    found = await find(connection, reference)
    check(if_match, etag(view(found)))
    return found


async def lock(
    connection: Connection,
    if_match: str | None,
    describe: Callable[..., Awaitable[msgspec.Struct]],
    *args: Any,
) -> None:
    """Locks the catalog, and checks `if_match` against the ETag of the view that
    `describe(connection, *args)` returns. If `describe` raises NotFound, no ETag matches."""
    await lock_catalog(connection)
    try:
        current = etag(await describe(connection, *args))
    except NotFound:
        current = None
    check(if_match, current)


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
