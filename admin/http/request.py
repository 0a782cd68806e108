"""Request to the admin plane, with the values that its handlers need."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from litestar.types import Message, Scope

from admin.audit.audit import Actor, changing
from admin.http.decoding import decode_json
from admin.http.guards import tenant_for
from admin.http.plane import AdminPlane
from admin.uploads.archive import StagingFolder
from admin.uploads.upload import T, UploadForm, receive_form
from store.database import Connection
from store.records import Caller, Tenant
from web.request import PlaneRequest, UploadPace
from web.request_head import client_address

BEHIND = "loraplex-gateways-behind"
"""Header of the answers to changes: number of gateways that may not use the change yet, or
`unknown`."""


class AdminRequest(PlaneRequest[Caller]):
    """Request whose `user` is the caller that the route's guard accepted."""

    @property
    def plane(self) -> AdminPlane:
        return self.app.state.admin

    @property
    def actor(self) -> Actor:
        return Actor(self.user, self.request_id, client_address(self.scope))

    def upload(self) -> AsyncGenerator[bytes]:
        """Yields a body of any size in chunks, which must arrive at `min_upload_rate`."""
        config = self.plane.config
        return self.stream(pace=UploadPace(config.upload_idle_s, config.min_upload_rate))

    async def receive_form(
        self,
        boundary: str,
        staged: StagingFolder,
        form: UploadForm[T],
        check: Callable[[T], Awaitable[None]],
    ) -> tuple[T, Path | None]:
        """Reads a form with an adapter's files to its end; see `admin.uploads.upload`."""
        staged.check_room(self.num_body_bytes)
        return await receive_form(boundary, self.upload(), staged, form, check)

    async def json(self) -> Any:
        """Decodes the body to the type of the handler's argument `data`. Unlike the framework, does
        not accept "5" for a number. Raises Invalid."""
        data = self.route_handler.parsed_data_field
        return decode_json(await self.body(), Any if data is None else data.annotation)

    async def decode(self, kind: type[T], max_bytes: int) -> T:
        """Decodes a body of at most `max_bytes` bytes to `kind`. Raises TooLarge or Invalid."""
        return decode_json(await self.read(max_bytes), kind)

    def reading(self) -> AbstractAsyncContextManager[Connection]:
        """Opens a read-only transaction that sees only the caller's rows."""
        return self.plane.database.transaction(self.actor.sees, readonly=True)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """Opens a transaction that sees only the caller's rows and logs its changes as made by the
        caller. Exits after `until_known`."""
        async with changing(self.plane.database, self.actor) as connection:
            yield connection
        await self.until_known()

    @asynccontextmanager
    async def with_tenant(
        self, tenant: str | None, *, changes: bool = False
    ) -> AsyncGenerator[tuple[Connection, Tenant]]:
        """Opens a transaction, in which rows may be changed if `changes` is set. Yields the
        connection, and the tenant that the caller names. Raises the errors of `tenant_for`."""
        async with self.transaction() if changes else self.reading() as connection:
            yield connection, await tenant_for(connection, self.user, tenant)

    async def until_known(self) -> None:
        """Waits until the gateways use what the request has changed, at most a second. The answer's
        header `BEHIND` has the number of gateways that may not use it yet."""
        behind = await self.plane.until_known()
        self.scope["state"][BEHIND] = "unknown" if behind is None else str(behind)


async def add_headers(message: Message, scope: Scope) -> None:
    """Adds the request's id to every answer, including refusals, and `BEHIND` to changes."""
    if message["type"] == "http.response.start" and BEHIND in scope["state"]:
        value = scope["state"][BEHIND].encode()
        message["headers"] = [*message["headers"], (BEHIND.encode(), value)]
    if message["type"] == "http.response.start" and "request_id" in scope["state"]:
        name = scope["state"]["request_id"].encode()
        message["headers"] = [*message["headers"], (b"x-request-id", name)]
