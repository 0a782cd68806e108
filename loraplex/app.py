"""The gateway and admin roles as processes: data plane, admin plane, or both on one port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import uvloop
from litestar import Litestar

import admin.app
import gateway.app
from adapters.store import Store
from admin.body_budget import BodyBudget
from admin.config import AdminConfig
from admin.database import EVERYTHING, Database
from admin.migrate import check_schema
from admin.plane import AdminPlane
from gateway import server
from gateway.config import GatewayConfig
from gateway.source import PostgresSource
from loraplex.bootstrap import load_pepper
from loraplex.errors import BadSettings
from loraplex.probes import make_probes
from loraplex.settings import Settings
from loraplex.waiting import until_there
from workers.client import WorkerClient
from workers.collector import look_for_cycles_less
from workers.logs import LogFormat, set_up_logging

DRAIN_TIMEOUT_S = 30
ADMIN_ACQUIRE_S = 2.0
"""Somebody waits for the answer, be it that the database is away."""
ADMIN_PATHS = ("/admin/", "/v1/organization/")

log = logging.getLogger(__name__)


class Composed:
    """Some paths go to the admin plane, everything else to the data plane."""

    def __init__(self, data: Any, administration: Litestar) -> None:
        self._data = data
        self._administration = administration
        self.plane: AdminPlane = administration.state.admin

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith(ADMIN_PATHS)
        await (self._administration if is_admin else self._data)(scope, receive, send)


class Server(server.Server):
    """Ends by signal as the other roles do, by a second one at once. uvicorn's own way raises the
    signal once more at the end, before the database is closed."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        if self.should_exit:
            # What is left is as after a crash, which loses nothing either.
            os._exit(1)
        self.should_exit = True


def run_gateway(settings: Settings, *, with_admin: bool, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then finishes what runs."""
    _run(_serve_gateway(settings, with_admin, listener), settings.log_format)


def run_admin(settings: Settings, listener: socket.socket) -> None:
    """The admin plane alone, with probes; otherwise as `run_gateway`."""
    _run(_serve_admin(settings, listener), settings.log_format)


def _run(serving: Coroutine[Any, Any, None], log_format: LogFormat) -> None:
    set_up_logging(log_format)
    # What these tell at these levels is told by us, or is each connection of a pool that retries.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    # So it ends when it is told to before it serves.
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        suppress(asyncio.CancelledError),
    ):
        runner.run(_until_told(serving))


async def _until_told(serving: Coroutine[Any, Any, None]) -> None:
    """Cancelled by SIGTERM, until a server takes the signal over."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await serving


async def _serve_gateway(settings: Settings, with_admin: bool, listener: socket.socket) -> None:
    if not settings.database_url:
        raise BadSettings("the gateway needs LORAPLEX_DATABASE_URL")
    settings.make_home()
    async with AsyncExitStack() as stack:
        database = await _connect(
            stack, settings, listener, application_name="loraplex-gateway", sees=EVERYTHING
        )
        store = settings.open_store()
        app: Any = _data_plane(settings, database, store)
        if with_admin:
            # Its own connections: what a gateway says of itself must not wait for uploads.
            app = Composed(app, await _admin_plane(stack, settings, store, listener))
        await _listen(settings, app, listener)


async def _serve_admin(settings: Settings, listener: socket.socket) -> None:
    if not settings.database_url:
        raise BadSettings("the admin plane needs LORAPLEX_DATABASE_URL")
    settings.make_home()
    async with AsyncExitStack() as stack:
        administration = await _admin_plane(stack, settings, settings.open_store(), listener)
        probes = make_probes(administration.state.admin.database)
        await _listen(settings, Composed(probes, administration), listener)


async def _listen(settings: Settings, app: Any, listener: socket.socket) -> None:
    config = server.make_config(
        app,
        drain_s=DRAIN_TIMEOUT_S,
        trusted_proxies=settings.trusted_proxies,
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
        bodies=BodyBudget(settings.max_body_memory),
    )
    look_for_cycles_less()
    async with _beside(app):
        await Server(config).serve(sockets=[listener])


async def _connect(
    stack: AsyncExitStack, settings: Settings, listener: socket.socket, **options: Any
) -> Database:
    """When the database is there; `listener` is answered meanwhile."""

    async def attempt() -> Database:
        database = await Database.connect(settings.database_url or "", **options)
        try:
            await check_schema(database)
        except BaseException:
            await database.close()
            raise
        return database

    database = await until_there(attempt, listener, log.warning)
    stack.push_async_callback(database.close)
    return database


@asynccontextmanager
async def _beside(app: Any) -> AsyncGenerator[None]:
    """What the admin plane does beside its requests."""
    work = asyncio.create_task(app.plane.run()) if isinstance(app, Composed) else None
    try:
        yield
    finally:
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _data_plane(settings: Settings, database: Database, store: Store) -> Litestar:
    own = GatewayConfig(
        model_folder=partial(store.model_folder, weights=False),
        security=settings.security,
        pepper=load_pepper(settings),
        spool=settings.home / "spool",
        max_spool_bytes=settings.max_usage_spool,
        catalog_stale_s=settings.catalog_stale_s,
    )
    return gateway.app.create_app(
        own,
        source=PostgresSource(database),
        clients=[
            WorkerClient(each, instance_id=own.instance_id, security=own.security)
            for each in settings.workers
        ],
        database=database,
    )


async def _admin_plane(
    stack: AsyncExitStack, settings: Settings, store: Store, listener: socket.socket
) -> Litestar:
    """Each of its transactions says what it may see."""
    database = await _connect(
        stack,
        settings,
        listener,
        application_name="loraplex-admin",
        acquire_timeout=ADMIN_ACQUIRE_S,
    )
    config = AdminConfig(
        pepper=load_pepper(settings),
        max_upload_bytes=settings.max_upload,
        max_lora_rank=settings.max_lora_rank,
        usage_days=settings.usage_days,
        audit_days=settings.audit_days,
        tenant_writes_per_minute=settings.tenant_writes_per_minute,
    )
    return admin.app.create_app(config, database=database, store=store)
