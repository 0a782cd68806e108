"""`python -m workers CONFIG.json`: one worker process, from its config to its last drained
sequence."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import uuid
from pathlib import Path

import msgspec

from workers.config import WorkerConfig
from workers.health import HealthServer
from workers.server import Server
from workers.telemetry import render_metrics
from workers.worker import Worker

DRAIN_TIMEOUT_S = 120.0


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = WorkerConfig.read(Path(sys.argv[1]))
    worker = Worker(config, instance_id=f"worker-{uuid.uuid4().hex[:12]}", progress=_report)
    asyncio.run(_serve(worker))


async def _serve(worker: Worker) -> None:
    """Until SIGTERM or SIGINT: then drains; a second signal ends at once."""
    config = worker.config
    server = Server(config.listen, instance_id=worker.instance_id)
    loop = worker.make_loop(server.deliver)
    health = HealthServer(
        config.health,
        is_ready=lambda: server.is_ready,
        documents={
            "/metrics": lambda: render_metrics(server.status),
            "/steps": lambda: msgspec.json.encode(worker.ring.columns()),
        },
    )
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stopping)
    await health.start()
    loop.start()
    await server.start(loop)
    logging.info("serving on %s, health on %s", server.address, health.address)
    await stopping.wait()
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            await server.drain()
    except TimeoutError:
        logging.warning("not drained after %g s", DRAIN_TIMEOUT_S)
    await server.close()
    await asyncio.to_thread(loop.stop)
    await health.close()


def _stop(stopping: asyncio.Event) -> None:
    if stopping.is_set():
        raise SystemExit(1)
    stopping.set()


def _report(name: str, done: int, total: int) -> None:
    """One line a tenth: the supervisor draws the bar."""
    if done * 10 // total != (done - 1) * 10 // total:
        logging.info("loading %s: %d %%", name, 100 * done // total)


if __name__ == "__main__":
    main()
