"""Processes of the roles gateway and admin: data plane, admin plane, or both on one port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any

import uvloop
from litestar import Litestar

import admin.app
import gateway.app
from adapters.store.folder import Store
from admin.adapters.ephemeral import Retention
from admin.http.plane import AdminConfig, AdminPlane
from admin.migrate import check_schema
from gateway.catalog.catalog import PostgresSource
from gateway.config import GatewayConfig, new_instance_id
from gateway.requests.services import GatewayRefusals
from gateway.telemetry import show_unread_answers
from gateway.tracing import Tracing
from loraplex.errors import BadSettings
from loraplex.otlp import otlp_url, without_secrets
from loraplex.roles.bootstrap import default_quota, disk_share, load_pepper
from loraplex.roles.forwarding import Forwarding
from loraplex.roles.listener import address_of, serves_apart
from loraplex.roles.management import management_app, public_app
from loraplex.roles.precautions import warnings_of
from loraplex.roles.probes import Readiness, make_probes
from loraplex.roles.tls import follow_files, load_tls
from loraplex.roles.waiting import serving_beside, until_there
from loraplex.settings import Settings
from loraplex.telemetry import send_metrics, show_certificates
from loraplex.tracing import trace_destination, tracing_to
from store.database import EVERYTHING, Database
from store.periodic import in_background
from telemetry.garbage_collection import look_for_cycles_less
from telemetry.logs import set_up_logging
from web import server
from web.edge import Draining
from web.held_bytes import AnswerBudget, BodyBudget
from web.version import this_version
from workers.wire.client import WorkerClient

DRAIN_S = 30.0
"""Default of `drain_s`, in seconds."""
MANAGEMENT_CONNECTIONS = 256
"""Maximum connections of the management listener. This is more than operators and their tools need,
and a small part of the process's file descriptors."""
ADMIN_ACQUIRE_S = 2.0
"""Maximum seconds that the admin plane waits for a database connection, before it answers that the
database is unavailable."""

log = logging.getLogger(__name__)


class Server(server.Server):
    """Server that drains at the first signal and ends at once at the second one. uvicorn's own
    server would raise the signal again before the database is closed."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        if self.should_exit:
            # The process may end without cleanup, because a crash loses nothing either.
            os._exit(1)
        self.should_exit = True


Sockets = tuple[socket.socket, socket.socket]
"""Pair of the public socket and the management socket."""


def run_gateway(
    settings: Settings,
    *,
    with_admin: bool,
    sockets: Sockets,
    warns: bool = True,
    worker_health: str | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then finishes running requests. `worker_health` is the health
    address of a worker whose metrics are added to the metrics page."""
    serving = _serve_gateway(settings, with_admin, sockets, warns, worker_health)
    _run(serving, settings)


def run_admin(settings: Settings, sockets: Sockets) -> None:
    """Serves the admin plane and probes, without the data plane, until SIGTERM or SIGINT."""
    _run(_serve_admin(settings, sockets), settings)


def _run(serving: Coroutine[Any, Any, None], settings: Settings) -> None:
    set_up_logging(settings.log_format or "text", settings.log_level)
    # These loggers' messages are hidden, because they are reported elsewhere, or are repeated for
    # each connection of a pool that retries.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    # A signal that arrives before the process serves cancels the task and ends the process.
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        suppress(asyncio.CancelledError),
    ):
        runner.run(_until_told(serving))


async def _until_told(serving: Coroutine[Any, Any, None]) -> None:
    """Runs `serving`. SIGTERM cancels it until a server installs its own signal handler."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await serving


async def _serve_gateway(
    settings: Settings,
    with_admin: bool,
    sockets: Sockets,
    warns: bool,
    worker_health: str | None,
) -> None:
    if not settings.database_url:
        raise BadSettings("the gateway needs LORAPLEX_DATABASE_URL")
    role = Role("gateway", settings, sockets)
    destination = trace_destination(os.environ)
    role.prepare(warns=warns)
    if warns and destination is not None:
        log.info("traces go to %s", destination)
    if warns and (url := otlp_url(os.environ, "metrics")) is not None:
        log.info("metrics go to %s", without_secrets(url))
    async with AsyncExitStack() as stack:
        database = await role.connect(stack, application_name="loraplex-gateway", sees=EVERYTHING)
        store = settings.open_store()
        instance_id = new_instance_id()
        tracing = await stack.enter_async_context(
            tracing_to(destination, instance_id=instance_id, slow_s=settings.slow_request_s)
        )
        beside = None
        if with_admin or settings.admin_url is not None:
            beside = admin.app.document_of_loads()
        data = _data_plane(settings, database, store, instance_id, tracing, beside)
        # The admin plane has its own database connections, so that the gateway's reports do not
        # wait for uploads.
        administration = await _admin_plane(stack, role, store) if with_admin else None
        loading = administration
        if loading is None and settings.admin_url is not None:
            config = _admin_config(settings)
            forwarding = Forwarding(settings.admin_url, data.gateway, config)
            stack.push_async_callback(forwarding.close)
            loading = forwarding.app()
        is_apart = serves_apart(sockets[0], role.tls)
        await role.serve(
            public_app(data, None if is_apart else administration, loading, worker_health),
            management_app(data, administration if is_apart else None, worker_health),
            plane=administration and administration.state.admin,
            says=f"{instance_id}, {'with' if with_admin else 'without'} the admin plane"
            + (" on the management listener" if with_admin and is_apart else ""),
        )


async def _serve_admin(settings: Settings, sockets: Sockets) -> None:
    if not settings.database_url:
        raise BadSettings("the admin plane needs LORAPLEX_DATABASE_URL")
    role = Role("admin", settings, sockets)
    role.prepare(warns=True)
    async with AsyncExitStack() as stack:
        administration = await _admin_plane(stack, role, settings.open_store())
        plane: AdminPlane = administration.state.admin
        probes = make_probes(Readiness(plane.database).check)
        await role.serve(
            public_app(probes, administration, administration),
            management_app(probes, None),
            plane=plane,
            says="the admin plane",
        )


class Role:
    """Role of this process, with its sockets and the applications on them."""

    def __init__(self, name: str, settings: Settings, sockets: Sockets) -> None:
        """Raises BadSettings if the certificate cannot be read."""
        self.name = name
        self.settings = settings
        self.tls = load_tls(settings)
        self._public, self._management = sockets
        self._bodies = BodyBudget(settings.max_body_memory)
        self._answers = AnswerBudget()
        show_unread_answers(lambda: self._answers.num_bytes)
        self._draining = Draining()

    def prepare(self, *, warns: bool) -> None:
        """Creates the data directory and starts sending metrics. If `warns` is set, logs warnings
        about risky settings. Raises BadSettings."""
        self.settings.make_home()
        send_metrics(self.name)
        show_certificates(self.settings.certificates)
        if warns:
            for warning in warnings_of(self.settings, self._public, self._management):
                log.warning("%s", warning)

    async def serve(
        self, public: Any, management: Any, plane: AdminPlane | None, says: str
    ) -> None:
        """Serves until a signal. The management listener runs until the public one has drained.
        `says` becomes part of the log line at the start."""
        settings = self.settings
        config = server.make_config(
            public,
            drain_s=DRAIN_S if settings.drain_s is None else settings.drain_s,
            trusted_proxies=settings.trusted_proxies,
            max_connections=settings.max_connections,
            max_connections_per_address=settings.max_connections_per_address,
            bodies=self._bodies,
            answers=self._answers,
            metrics=GatewayRefusals(),
            draining=self._draining,
            tls=self.tls,
        )
        async with (
            in_background(plane.run()) if plane else nullcontext(),
            self._managing(management),
            # This task reloads certificates that are renewed on disk.
            in_background(follow_files(self.tls, self.settings)) if self.tls else nullcontext(),
        ):
            log.info(
                "loraplex %s %s serves on %s%s, management on %s: %s",
                *(self.name, this_version(), address_of(self._public)),
                *(" with TLS" if self.tls else "", address_of(self._management), says),
            )
            look_for_cycles_less()
            await Server(config).serve(sockets=[self._public])

    async def connect(self, stack: AsyncExitStack, **options: Any) -> Database:
        """Waits for the database and returns it. Until then, the public socket answers 503."""

        async def attempt() -> Database:
            database = await Database.connect(self.settings.database_url or "", **options)
            try:
                await check_schema(database)
            except BaseException:
                await database.close()
                raise
            return database

        database = await until_there(attempt, self._public, log.warning, self.tls)
        stack.push_async_callback(database.close)
        return database

    def _managing(self, app: Any) -> AbstractAsyncContextManager[None]:
        config = server.make_config(
            app,
            drain_s=1,
            max_connections=MANAGEMENT_CONNECTIONS,
            bodies=self._bodies,
            answers=self._answers,
            metrics=GatewayRefusals(),
            draining=self._draining,
        )
        # The lifespan is off here, because the public server runs the startup and shutdown of the
        # planes.
        config.lifespan = "off"
        return serving_beside(config, self._management)


def _data_plane(
    settings: Settings,
    database: Database,
    store: Store,
    instance_id: str,
    tracing: Tracing,
    beside: dict[str, Any] | None,
) -> gateway.app.DataPlane:
    """Creates the data plane. `beside` is the OpenAPI document of another application whose routes
    are added to the data plane's document."""
    own = GatewayConfig(
        instance_id=instance_id,
        tracing=tracing,
        model_folder=partial(store.model_folder, weights=False),
        security=settings.security,
        pepper=load_pepper(settings),
        wal=settings.home / "spool",
        max_wal_bytes=settings.max_usage_wal,
        **settings.common_with(GatewayConfig),
    )
    return gateway.app.create_app(
        own,
        source=PostgresSource(database),
        clients=[
            WorkerClient(each, instance_id=own.instance_id, security=own.security)
            for each in settings.workers
        ],
        database=database,
        document_beside=beside,
    )


async def _admin_plane(stack: AsyncExitStack, role: Role, store: Store) -> Litestar:
    """Creates the admin plane, whose transactions each declare which rows they may see."""
    config = _admin_config(role.settings)
    database = await role.connect(
        stack, application_name="loraplex-admin", acquire_timeout=ADMIN_ACQUIRE_S
    )
    return admin.app.create_app(config, database=database, store=store)


def _admin_config(settings: Settings) -> AdminConfig:
    """Returns the configuration of the admin plane. Raises BadSettings."""
    own = {
        "pepper": load_pepper(settings),
        "max_upload_bytes": settings.max_upload,
        "max_image_bytes": settings.max_adapter_image,
        "default_quota": default_quota(settings),
        "default_adapter_bytes": disk_share(settings),
        "retention": Retention(settings.ephemeral_versions, settings.ephemeral_ttl_s),
        "adapter_roots": settings.opened_folders,
    }
    return AdminConfig(**settings.common_with(AdminConfig) | own)
