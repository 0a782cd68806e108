"""A request to the admin plane, with what its handlers need at hand."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from litestar import Request
from litestar.datastructures import State
from litestar.types import Message, Scope

from admin.audit.audit import Actor, changing
from admin.body_budget import held_body
from admin.client_address import client_address
from admin.database import Connection
from admin.errors import Stalled
from admin.http.body import UploadPace, decode_json, held_chunks, released_chunks
from admin.http.plane import AdminPlane
from admin.records import ApiKey

ADMIN = "admin"
"""Stands for the tenant of admin keys, which have none, where bytes are counted."""


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
        address = client_address(self.scope)
        return Actor(self.user, self.scope["state"]["request_id"], address)

    @property
    def num_body_bytes(self) -> int:
        """Size of the body by its head; 0 if the body tells its end in another way."""
        return int(self.headers.get("content-length") or 0)

    async def stream(self) -> AsyncGenerator[bytes]:
        """The body as it comes; its bytes count as held until the answer. Raises Stalled if it
        comes too slowly, and, unread, if the client leaves; Overloaded."""
        held, chunks, num_bytes = held_body(self.scope), self._chunks(), 0
        began = asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout_at(held.latest_end(began, num_bytes)):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Stalled("the body of the request came too slowly") from None
            num_bytes += len(chunk)
            yield chunk

    async def upload(self) -> AsyncGenerator[bytes]:
        """The body as it comes, of any size: each chunk's bytes are given back when the next is
        asked for. Raises Stalled if fewer come than an upload must bring; Overloaded."""
        config, held = self.plane.config, held_body(self.scope)
        pace = UploadPace(config.upload_idle_s, config.min_upload_rate)
        async for chunk in released_chunks(self._chunks(), held, pace):
            yield chunk

    async def _chunks(self) -> AsyncGenerator[bytes]:
        held = held_body(self.scope)
        held.charge(self.user.tenant_id or ADMIN)
        async for chunk in held_chunks(super().stream(), held):
            yield chunk

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
        left when gateways go by it: a client that is told of a change finds it in force."""
        async with changing(self.plane.database, self.actor) as connection:
            yield connection
        await self.plane.until_known()


async def add_request_id(message: Message, scope: Scope) -> None:
    """Hook before each send: every answer, refusals included, says its id."""
    if message["type"] == "http.response.start" and "request_id" in scope["state"]:
        name = scope["state"]["request_id"].encode()
        message["headers"] = [*message["headers"], (b"x-request-id", name)]
