"""Request to the admin plane, with the values that its handlers need."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from litestar import Request
from litestar.datastructures import State
from litestar.types import Message, Scope

from admin.audit.audit import Actor, changing
from admin.http.body import UploadPace, decode_json, held_chunks, released_chunks
from admin.http.plane import AdminPlane
from admin.uploads.upload import T, UploadForm, receive_form
from store.database import Connection
from store.records import ApiKey
from web.body_budget import held_body
from web.client_address import client_address
from web.errors import Stalled

ADMIN = "admin"
"""Owner of request bodies sent with an admin key, which has no tenant."""


class AdminRequest(Request[ApiKey, Any, State]):
    """Request whose `user` is the accepted key. Changes are logged with the request's id, which is
    always the server's own and never taken from the client."""

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
        """Content-Length of the request, or 0 if the header is missing."""
        return int(self.headers.get("content-length") or 0)

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yields the body in chunks as it arrives. Its bytes count as held in memory until the
        request is answered. Raises Overloaded, or Stalled if the body arrives too slowly or the
        client disconnects."""
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
        """Yields a body of any size in chunks as it arrives. The bytes of a chunk are released when
        the next chunk is requested. Raises Overloaded, or Stalled if the upload is too slow."""
        config, held = self.plane.config, held_body(self.scope)
        pace = UploadPace(config.upload_idle_s, config.min_upload_rate)
        async for chunk in released_chunks(self._chunks(), held, pace):
            yield chunk

    async def receive_form(
        self,
        boundary: str,
        staged: Path,
        form: UploadForm[T],
        check: Callable[[T], Awaitable[None]],
    ) -> tuple[T, Path | None]:
        """Reads a form with an adapter's files to its end; see `admin.uploads.upload`."""
        plane = self.plane
        plane.store.check_room(self.num_body_bytes)
        return await receive_form(
            boundary,
            self.upload(),
            staged,
            plane.config.max_upload_bytes,
            plane.store.check_room,
            form,
            check,
        )

    async def _chunks(self) -> AsyncGenerator[bytes]:
        held = held_body(self.scope)
        held.charge(self.user.tenant_id or ADMIN)
        async for chunk in held_chunks(super().stream(), held):
            yield chunk

    async def json(self) -> Any:
        """Returns the decoded body, as the type of the handler's argument `data`. Strict: refuses
        "5" for a number, which the framework would accept. Raises Invalid."""
        data = self.route_handler.parsed_data_field
        return decode_json(await self.body(), Any if data is None else data.annotation)

    def reading(self) -> AbstractAsyncContextManager[Connection]:
        """Opens a read-only transaction that sees only the caller's rows."""
        return self.plane.database.transaction(self.actor.sees, readonly=True)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """Opens a transaction that sees only the caller's rows and logs its changes as made by the
        caller. Exits once the live gateways have applied the change."""
        async with changing(self.plane.database, self.actor) as connection:
            yield connection
        await self.plane.until_known()


async def add_request_id(message: Message, scope: Scope) -> None:
    """Adds the request's id to every answer, including refusals."""
    if message["type"] == "http.response.start" and "request_id" in scope["state"]:
        name = scope["state"]["request_id"].encode()
        message["headers"] = [*message["headers"], (b"x-request-id", name)]
