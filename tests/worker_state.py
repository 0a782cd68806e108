"""What a stack's worker says of itself on its own HTTP listener."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from loraplex.private import socket_folder
from tests.stack import Stack
from workers.process.loop import STATUS_PERIOD_S
from workers.wire.client import WorkerClient
from workers.wire.status import WorkerStatus

IN_USE = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "loraplex_adapter_leases",
)
"""Metrics that are zero when nothing runs; what is merely cached is not in use."""


def _get(stack: Stack, path: str) -> httpx.Response:
    name = "worker-health.sock"
    socket = socket_folder(stack.data_dir, name) / name
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
        return client.get(f"http://worker{path}")


def worker_metrics(stack: Stack) -> dict[str, float]:
    """Prometheus values by name, summed over labels, none older than this call: what a worker says
    of itself may be a period old."""
    time.sleep(2 * STATUS_PERIOD_S)
    return _values(worker_page(stack))


def worker_page(stack: Stack) -> str:
    """Its /metrics as they are now."""
    return _get(stack, "/metrics").text


async def metrics_at(health: str) -> dict[str, float]:
    """The same, of a worker with its own listener at `unix:PATH`."""
    transport = httpx.AsyncHTTPTransport(uds=health.removeprefix("unix:"))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return _values((await client.get("/metrics")).text)


def _values(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name = line.partition("{")[0].split()[0]
        values[name] = values.get(name, 0.0) + float(line.rsplit(None, 1)[1])
    return values


def worker_steps(stack: Stack) -> dict[str, list[float]]:
    """The step ring by column, oldest first."""
    return _get(stack, "/steps").json()


@contextmanager
def watched_worker(stack: Stack) -> Iterator[list[WorkerStatus]]:
    """What the worker tells its gateways of itself while this lasts, as one of them hears it."""
    statuses: list[WorkerStatus] = []
    stopping = threading.Event()
    socket = next(stack.data_dir.rglob("worker.sock"))

    async def watch() -> None:
        client = WorkerClient(f"unix:{socket}", instance_id="watch")
        running = asyncio.create_task(client.run())
        while not stopping.is_set():
            if client.status is not None and client.status not in statuses[-1:]:
                statuses.append(client.status)
            await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(watch(),))
    thread.start()
    try:
        yield statuses
    finally:
        stopping.set()
        thread.join()
