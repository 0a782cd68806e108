"""Command `python -m workers CONFIG.json [ID]`, which runs one worker process until it is drained.

Without an ID, the worker generates one. The worker has no page /metrics. The command `python -m
loraplex.roles.worker_process` starts a worker that has this page.

Exit codes: 0 after a drain, 1 after a failure, 2 if the configuration cannot be served."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from adapters.store.folder import NotInStore
from telemetry.garbage_collection import look_for_cycles_less
from telemetry.logs import set_up_logging
from workers.observe.metrics import show
from workers.process.build import Worker
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe
from workers.process.health import HealthServer
from workers.process.server import Server

SWEEP_S = 600.0
"""Seconds between two removals of packed images of deleted adapters. Each removal sends one request
to the store for every image."""


def main(worker: type[Worker] = Worker, metrics: Callable[[], bytes] | None = None) -> None:
    """Runs the worker. metrics: thread-safe function that returns the page of /metrics, or None for
    a worker without that page."""
    config = WorkerConfig.read(Path(sys.argv[1]))
    set_up_logging(config.log_format, config.log_level)
    instance_id = sys.argv[2] if len(sys.argv) > 2 else f"worker-{uuid.uuid4().hex[:12]}"
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as engine:
        try:
            building = engine.submit(worker, config, instance_id=instance_id, progress=_report)
            asyncio.run(_serve(building.result(), engine, metrics))
        except NotInStore as error:
            logging.error("the store %s has no %s", config.store, error)
            sys.exit(1)
        except CannotServe as error:
            logging.error("%s", error)
            sys.exit(2)
        except CannotListen as error:
            logging.error("%s", error)
            sys.exit(1)


class CannotListen(Exception):
    """Raised if the worker cannot listen on an address of its configuration, for example because
    another process uses it."""


@contextmanager
def _listening(address: str) -> Generator[None]:
    """Context manager that raises CannotListen in place of an OSError in its body."""
    try:
        yield
    except OSError as error:
        raise CannotListen(f"cannot listen on {address}: {error.strerror}") from error


async def _serve(
    worker: Worker, engine: ThreadPoolExecutor, metrics: Callable[[], bytes] | None
) -> None:
    """Serves until SIGTERM or SIGINT, and then drains the worker. A second signal ends the process
    at once. engine: executor of the thread that built the worker."""
    config = worker.config
    server = Server(config.listen, instance_id=worker.instance_id, security=config.security)
    loop = worker.make_loop(server.deliver)
    documents = {"/steps": lambda: msgspec.json.encode(worker.ring.columns())}
    if metrics is not None:
        show(lambda: server.status)
        documents["/metrics"] = metrics
    health = HealthServer(config.health, why_not_ready=server.why_not_ready, documents=documents)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stopping)
    with _listening(config.health):
        await health.start()
    look_for_cycles_less()
    running = asyncio.get_running_loop().run_in_executor(engine, loop.run)
    running.add_done_callback(lambda _: stopping.set())
    try:
        with _listening(config.listen):
            await server.start(loop)
        logging.info("serving on %s, health on %s", server.address, health.address)
        sweeping = asyncio.create_task(_sweep(worker))
        await stopping.wait()
        sweeping.cancel()
        if not running.done():
            draining = asyncio.create_task(server.drain())
            ends = asyncio.FIRST_COMPLETED
            await asyncio.wait([draining, running], timeout=config.drain_s, return_when=ends)
            if not (draining.done() or running.done()):
                logging.warning("not drained after %g s", config.drain_s)
        await server.close()
    finally:
        loop.stop()
        await health.close()
        try:
            await running
        finally:
            await asyncio.to_thread(worker.close)


async def _sweep(worker: Worker) -> None:
    """Removes packed images of deleted adapters every `SWEEP_S` seconds until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            await asyncio.to_thread(worker.remove_deleted_images)
        except OSError as error:
            logging.warning("removing packed images of deleted adapters failed: %s", error)


def _stop(stopping: asyncio.Event) -> None:
    if stopping.is_set():
        # Only the end of the process can stop the engine's thread during a step.
        os._exit(1)
    stopping.set()


def _report(name: str, done: int, total: int) -> None:
    """Logs one line for each tenth of a model that is loaded. The supervisor of the process shows
    these lines as a progress bar."""
    if done * 10 // total != (done - 1) * 10 // total:
        logging.info("loading %s: %d %%", name, 100 * done // total)


if __name__ == "__main__":
    main()
