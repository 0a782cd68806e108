"""Runs everything on one machine: Postgres, worker and gateway are children of this process.

The database is started first, then the models are imported, then the worker is started, in parallel
with migrations and the gateway. At the end, the gateway stops first, then the worker, then the
database, so that each process outlives the processes that use it. The children cannot outlive this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from admin.models.base_choice import source_of
from gateway.dispatch.fleet import NONE_SERVES
from loraplex.api import Api
from loraplex.box import demo
from loraplex.box.children import Child, environment_of_child, python
from loraplex.box.end_signals import EndSignals
from loraplex.box.importing import Formats, check_source, import_model
from loraplex.box.postgres import EmbeddedPostgres
from loraplex.box.weight_format import serving_format
from loraplex.errors import BadSettings, PostgresError
from loraplex.otlp import otlp_url, without_secrets
from loraplex.otlp_metrics import check_metric_sending
from loraplex.output import progress, relay, tell
from loraplex.private import make_private_folder, socket_folder, write_private
from loraplex.probe import answer_of, answers_ok
from loraplex.roles.bootstrap import (
    Keys,
    default_quota,
    ensure_keys,
    load_pepper,
    migrate_database,
    register,
    registered_models,
)
from loraplex.roles.listener import address_of, listen, listen_for_management, serves_apart
from loraplex.roles.planes import DRAIN_S
from loraplex.roles.precautions import warnings_of
from loraplex.roles.tls import load_tls
from loraplex.roles.waiting import until_there
from loraplex.roles.worker import worker_config
from loraplex.running import RunningServer, announced, server_of
from loraplex.settings import Settings
from loraplex.tracing import trace_destination
from store.database import EVERYTHING, Database
from telemetry.logs import set_up_logging
from workers.wire.status import UNSATISFIABLE

END_S = 10.0
"""Seconds that a gateway has after its drain to record usage and exit."""
WORKER_DRAIN_S = 30.0
"""Seconds for the worker to drain. Its requests have ended, because the gateway stops first."""
START_TIMEOUT_S = 600.0
NOTHING_TO_SERVE = "nothing to serve: no model is registered; give --model PATH, or --demo"
POSTGRES_LOOK_S = 0.5


def serve(settings: Settings, *, with_demo: bool) -> None:
    """Serves until SIGINT or SIGTERM. If the start fails, stops everything and raises its error."""
    started = time.monotonic()
    if settings.log_format is None and sys.stderr.isatty():
        settings = msgspec.structs.replace(settings, log_format="short")
    if settings.log_format == "json":
        set_up_logging("json", settings.log_level)
        # Without this, httpx would log each request that this process sends.
        logging.getLogger("httpx").setLevel(logging.WARNING)
    signals = EndSignals()
    models = dict(settings.models)
    if with_demo:
        models.setdefault(demo.MODEL_NAME, str(demo.find_model()))
    is_new = settings.database_url is None and not (settings.home / "keys.json").exists()
    if not models and is_new:
        raise BadSettings(NOTHING_TO_SERVE)
    # Settings are checked before anything is started.
    trace_destination(os.environ)
    check_metric_sending(os.environ)
    tls = load_tls(settings)
    default_quota(settings)
    settings.make_home()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(settings.home))
        # The socket is opened here, so that it survives a crash of the gateway.
        listener = stack.enter_context(listen(settings))
        management = stack.enter_context(listen_for_management(settings))
        for warning in warnings_of(settings, listener, management):
            tell(f"warning: {warning}")
        for path in models.values():
            check_source(Path(path))
        postgres, dsn = stack.enter_context(_database(settings))
        known = {} if is_new else signals.run(_registered(dsn, listener, tls))
        digests = {
            name: _import(name, Path(path), settings, known.get(name))
            for name, path in models.items()
        } or known
        if not digests:
            raise BadSettings(NOTHING_TO_SERVE)
        sources = {name: source_of(Path(path).absolute()) for name, path in models.items()}
        box = Box(settings, (listener, management), postgres, dsn, digests, sources, with_demo)
        asyncio.run(box.run(started, signals))


class Box:
    """Supervisor of the worker and the gateway."""

    def __init__(
        self,
        settings: Settings,
        sockets: tuple[socket.socket, socket.socket],
        postgres: EmbeddedPostgres | None,
        dsn: str,
        digests: dict[str, str],
        sources: dict[str, str],
        with_demo: bool,
    ) -> None:
        """`digests` and `sources` are the digest and the source of each base model, by served name.
        A model without an entry in `sources` is registered already, with its source."""
        self._settings = settings
        self._listener, self._management = sockets
        self._tls = load_tls(settings)
        self._postgres = postgres
        self._dsn = dsn
        self._digests = digests
        self._sources = sources
        self._with_demo = with_demo
        folder = make_private_folder(socket_folder(settings.home, "worker-health.sock"))
        self._worker_address = f"unix:{folder / 'worker.sock'}"
        self._worker_health = f"unix:{folder / 'worker-health.sock'}"
        scheme = "http" if self._tls is None else "https"
        self._url = f"{scheme}://{address_of(self._listener)}"
        # This process calls the gateway at its management address, which is served without TLS.
        self._address = address_of(self._management)
        management_url = f"http://{self._address}"
        is_apart = serves_apart(self._listener, self._tls)
        self._admin_url = management_url if is_apart else self._url
        self._where = RunningServer(
            url=self._url,
            admin_url=self._admin_url,
            management_url=management_url,
            pid=os.getpid(),
            data_dir=settings.home,
        )
        self._worker = self._make_worker()
        self._gateway = self._make_gateway()

    async def run(self, started: float, signals: EndSignals) -> None:
        """Serves until a signal. `started` is the time.monotonic() at which the start began."""
        stopping = asyncio.Event()
        watching = asyncio.create_task(self._watch_postgres())
        with signals.calling(partial(self._on_signal, stopping)):
            try:
                keys = await _unless(stopping, self._start())
                if keys is not None:
                    with announced(self._where):
                        # keys.json is written only when the server is ready, as scripts wait for
                        # it.
                        keys.write(self._settings.home / "keys.json")
                        self._announce(keys, time.monotonic() - started)
                        await stopping.wait()
            finally:
                tell("stopping")
                await self._stop()
                watching.cancel()

    def _on_signal(self, stopping: asyncio.Event) -> None:
        """Drains at the first signal, and kills the children at the second one."""
        if stopping.is_set():
            self._gateway.kill()
            self._worker.kill()
        stopping.set()

    async def _start(self) -> Keys:
        settings = self._settings
        # The worker is started first, because it needs no database and takes the longest.
        await self._worker.start()
        await _migrate(self._dsn, self._listener, self._tls)
        database = await Database.connect(
            self._dsn, sees=EVERYTHING, application_name="loraplex-serve"
        )
        try:
            tenants = demo.TENANTS if self._with_demo else ()
            known, limits = Keys.read(settings.home / "keys.json"), default_quota(settings)
            keys = await ensure_keys(database, load_pepper(settings), known, tenants, limits)
            store = settings.open_store()
            for name, digest in self._digests.items():
                source = self._sources.get(name, "")
                await register(database, store, name, digest, settings.max_model_len, source)
        finally:
            await database.close()
        await self._gateway.start()
        await self._gateway.wait_ready(lambda: answers_ok(self._address, "/livez"), START_TIMEOUT_S)
        with Api(self._admin_url, keys.admin) as admin:
            pushed = await asyncio.to_thread(demo.push_adapters, admin) if self._with_demo else []
            await self._worker.wait_ready(partial(_is_up, self._worker_health), START_TIMEOUT_S)
            await self._gateway.wait_ready(partial(_is_up, self._address), START_TIMEOUT_S)
            for name in await asyncio.to_thread(demo.wait_adapters, admin, pushed):
                tell(f"adapter {name}")
        return keys

    async def _stop(self) -> None:
        # This process's copy of the listening socket must be closed too. Otherwise clients would
        # wait in the socket's queue forever.
        self._listener.close()
        self._management.close()
        given = self._settings.drain_s
        await self._gateway.stop((DRAIN_S if given is None else given) + END_S)
        await self._worker.stop(WORKER_DRAIN_S)

    async def _watch_postgres(self) -> None:
        """Restarts Postgres whenever it ends. Restarts it in this thread, because the kernel stops
        the server when the thread that started it ends. Does not wait until the server answers,
        because this thread also handles signals and children."""
        backoff_s = POSTGRES_LOOK_S
        while self._postgres is not None:
            await asyncio.sleep(backoff_s)
            if self._postgres.running:
                backoff_s = POSTGRES_LOOK_S
                continue
            tell("postgres: ended; starting again")
            backoff_s = min(2 * backoff_s, 30.0)
            try:
                self._postgres.launch(time.monotonic())
            except (PostgresError, OSError) as error:
                tell(f"postgres: cannot be started, trying again in {backoff_s:.0f} s: {error}")

    def _make_worker(self) -> Child:
        settings = self._settings
        config = worker_config(settings, self._digests, self._worker_address, self._worker_health)
        path = settings.home / "worker.json"
        write_private(path, config.to_json())
        command = python("-m", "loraplex.roles.worker_process", str(path))
        environment = environment_of_child()
        return Child("worker", command, environment=environment, tell=tell, relay=relay)

    def _make_gateway(self) -> Child:
        settings = self._settings
        fds = [self._listener.fileno(), self._management.fileno()]
        # The gateway gets neither the command line's key and URL nor the models, which it reads
        # from the database.
        passed = msgspec.structs.replace(
            settings,
            key=None,
            url=None,
            models={},
            store=settings.store_location,
            workers=(self._worker_address,),
            database_url=self._dsn,
        )
        environment = environment_of_child() | passed.environment()
        command = python("-m", "loraplex", "gateway", "--admin", "--fd", str(fds[0]))
        command += ["--management-fd", str(fds[1]), "--worker-health", self._worker_health]
        return Child(
            "gateway", command, environment=environment, tell=tell, relay=relay, pass_fds=fds
        )

    def _announce(self, keys: Keys, seconds: float) -> None:
        tell(f"ready after {seconds:.1f} s on {self._url}")
        if (destination := trace_destination(os.environ)) is not None:
            tell(f"traces go to {destination}")
        if (url := otlp_url(os.environ, "metrics")) is not None:
            tell(f"metrics go to {without_secrets(url)}")
        if self._settings.log_format == "json":
            return
        command = command_line()
        print(f"\n  {self._url}/ in a browser: links, the API's reference at /docs")
        print("  in another terminal:")
        if self._with_demo:
            print(f"    {command} chat support-bot")
        print(f"    {command} quickstart NAME    a tenant, its key and its first adapter")
        print(f"    {command} --help")
        print(f"\n  keys are in {self._settings.home / 'keys.json'}; Ctrl-C stops\n")
        # Keys are printed only to a terminal, because the output of a service is kept as its log.
        # The keys of the demo are no secret.
        if self._with_demo or sys.stdout.isatty():
            print(f"  admin key   {keys.admin}")
            for name, key in keys.tenants.items():
                print(f"  {name:<11} {key}")
        if self._with_demo:
            print(
                f"\n  curl -N {self._url}/v1/chat/completions"
                f" -H 'Authorization: Bearer {keys.tenants['acme']}'"
                " -H 'Content-Type: application/json'"
                ' -d \'{"model": "support-bot", "stream": true,'
                ' "messages": [{"role": "user", "content": "Where is my parcel?"}]}\'\n'
            )
        sys.stdout.flush()


def command_line() -> str:
    """Returns the shell command that runs this installation's `loraplex`."""
    script = Path(sys.executable).with_name("loraplex")
    found = shutil.which("loraplex")
    return "loraplex" if found and Path(found).absolute() == script else str(script)


def _is_up(address: str) -> bool:
    """Returns whether the process is ready, or is unready only because the worker serves none of
    the base models, which can be corrected through the admin plane."""
    answer = answer_of(address, "/readyz")
    is_up = answer.startswith(b"HTTP/1.1 200 ")
    return is_up or any(each.encode() in answer for each in (UNSATISFIABLE, NONE_SERVES))


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, Keys]) -> Keys | None:
    """Returns the result of `work`, or None if the event `stopping` was set first."""
    task = asyncio.create_task(work)
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return task.result()


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Locks the data directory, because its keys, sockets and worker settings belong to one server.
    Raises BadSettings if another server uses it."""
    descriptor = os.open(home, os.O_RDONLY)
    try:
        # The folder itself is locked, because a lock file in it would make a new folder look used.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        url = f" on {found.url}" if (found := server_of(home)) else ""
        raise BadSettings(
            f"another loraplex serves from {home}{url}: `loraplex model add` gives it another"
            " model; or give --data-dir and --port for a second one"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _database(settings: Settings) -> Iterator[tuple[EmbeddedPostgres | None, str]]:
    """Yields the embedded server and its URL after starting the server. If the settings have the
    URL of an external server, yields None and this URL."""
    if settings.database_url:
        yield None, settings.database_url
        return
    tell("starting the embedded Postgres")
    with EmbeddedPostgres(settings.home, user=settings.pg_user) as postgres:
        yield postgres, postgres.dsn()


async def _migrate(dsn: str, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Waits until the database answers, and migrates it."""
    if applied := await until_there(partial(migrate_database, dsn), listener, tell, tls):
        tell(f"migrations applied: {', '.join(applied)}")


async def _registered(
    dsn: str, listener: socket.socket, tls: ssl.SSLContext | None
) -> dict[str, str]:
    """Migrates the database and returns the digest of each base model in it by served name."""
    await _migrate(dsn, listener, tls)
    return await registered_models(dsn)


def _import(name: str, path: Path, settings: Settings, registered: str | None) -> str:
    formats = serving_format(path, settings, registered)
    notes: list[str] = []
    with progress(f"importing {name}") as report:
        digest = import_model(path, settings, report, formats, notes.append)
    for sentence in notes:
        tell(f"{name}: {sentence}")
    if formats == Formats("keep"):
        tell(f"{name} stays in the file's own format: the same answers, faster on this processor")
    return digest
