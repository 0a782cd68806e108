"""The gateway role as a process: data plane, and admin plane where it is wanted, on one port."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop
from litestar import Litestar

import admin.app
import gateway.app
from admin.config import AdminConfig
from admin.database import EVERYTHING, Database
from admin.plane import AdminPlane
from gateway.config import GatewayConfig
from gateway.server import make_config
from gateway.source import PostgresSource
from loraplex.bootstrap import load_pepper
from loraplex.errors import BadSettings
from loraplex.settings import Settings
from workers.client import WorkerClient

DRAIN_TIMEOUT_S = 30
ADMIN_ACQUIRE_S = 2.0
"""Somebody waits for the answer, be it that the database is away."""
ADMIN_PATHS = ("/admin/", "/v1/organization/")


class Composed:
    """Some paths go to the admin plane, everything else to the data plane."""

    def __init__(self, data: Any, administration: Litestar) -> None:
        self._data = data
        self._administration = administration
        self.plane: AdminPlane = administration.state.admin

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith(ADMIN_PATHS)
        await (self._administration if is_admin else self._data)(scope, receive, send)


class Server(uvicorn.Server):
    """Ends by signal as the other roles do: uvicorn's own way raises the signal once more at the
    end, before the database is closed."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield


def run_gateway(settings: Settings, *, with_admin: bool, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then finishes what runs."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # What these tell at these levels is told by us, or is each connection of a pool that retries.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, with_admin, listener))


async def _serve(settings: Settings, with_admin: bool, listener: socket.socket) -> None:
    if not settings.database_url:
        raise BadSettings("the gateway needs LORAPLEX_DATABASE_URL")
    if not settings.workers:
        raise BadSettings("the gateway needs LORAPLEX_WORKERS, the addresses of the workers")
    async with AsyncExitStack() as stack:
        database = await _connect(
            stack, settings.database_url, application_name="loraplex-gateway", sees=EVERYTHING
        )
        administered = None
        if with_admin:
            # Its own connections: what a gateway says of itself must not wait for uploads.
            # Each transaction says what it may see.
            administered = await _connect(
                stack,
                settings.database_url,
                application_name="loraplex-admin",
                acquire_timeout=ADMIN_ACQUIRE_S,
            )
        app = _compose(settings, database, administered)
        config = make_config(app, drain_s=DRAIN_TIMEOUT_S, trusted_proxies=settings.trusted_proxies)
        async with _beside(app):
            await Server(config).serve(sockets=[listener])


async def _connect(stack: AsyncExitStack, url: str, **options: Any) -> Database:
    database = await Database.connect(url, **options)
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


def _compose(settings: Settings, database: Database, administered: Database | None) -> Any:
    pepper = load_pepper(settings)
    store = settings.open_store()
    find_model = partial(store.model_folder, weights=False)
    own = GatewayConfig(
        model_folder=find_model,
        pepper=pepper,
        spool=settings.home / "spool",
        max_spool_bytes=settings.max_usage_spool,
    )
    data = gateway.app.create_app(
        own,
        source=PostgresSource(database),
        clients=[WorkerClient(each, instance_id=own.instance_id) for each in settings.workers],
        database=database,
    )
    if administered is None:
        return data
    config = AdminConfig(
        pepper=pepper,
        max_upload_bytes=settings.max_upload,
        max_lora_rank=settings.max_lora_rank,
        usage_days=settings.usage_days,
    )
    return Composed(data, admin.app.create_app(config, database=administered, store=store))
