"""A request to the admin plane, with what its handlers need at hand."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from litestar.types import Message, Scope

from admin.audit import Actor, changing
from admin.body import decode_json
from admin.database import Connection
from admin.errors import Stalled
from admin.records import ApiKey

if TYPE_CHECKING:
    from admin.plane import AdminPlane


class AdminRequest(Request[ApiKey, Any, State]):
    """`user` is the key the guard let pass. The id is always ours: changes are logged with it."""

    def __init__(self, scope: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scope, *args, **kwargs)
        scope["state"].setdefault("request_id", f"req_{uuid.uuid4().hex}")

    @property
    def plane(self) -> AdminPlane:
        return self.app.state.admin

    @property
    def actor(self) -> Actor:
        return Actor(self.user, self.scope["state"]["request_id"])

    async def stream(self) -> AsyncGenerator[bytes]:
        """The body as it comes. Raises Stalled, which nobody reads, if the client leaves."""
        try:
            async for chunk in super().stream():
                yield chunk
        except InternalServerException:
            raise Stalled("the client left before its request was whole") from None

    async def json(self) -> Any:
        """The body as what the handler takes as `data`, strictly: the framework would take "5" for
        5. Raises Invalid."""
        data = self.route_handler.parsed_data_field
        return decode_json(await self.body(), Any if data is None else data.annotation)

    def reading(self) -> AbstractAsyncContextManager[Connection]:
        """A connection that only reads, and only what the caller may see."""
        return self.plane.database.transaction(self.actor.sees, readonly=True)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """It sees what the caller may, and what changes in it is logged as the caller's. It is
        left when gateways go by it: who is told of a change finds it in force."""
        async with changing(self.plane.database, self.actor) as connection:
            yield connection
        await self.plane.until_known()


async def add_request_id(message: Message, scope: Scope) -> None:
    """Hook before each send: every answer, refusals included, says its id."""
    if message["type"] == "http.response.start" and "request_id" in scope["state"]:
        name = scope["state"]["request_id"].encode()
        message["headers"] = [*message["headers"], (b"x-request-id", name)]
