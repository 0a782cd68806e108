"""`python -m benchmarks.flood`: what a flood of made-up keys costs those who have one.

The set-up of benchmarks/gateway.py. Rounds without and with the flood take turns; each of its keys
is new, and every other one is well formed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from admin.records import new_key
from benchmarks.gateway import Bench, Cores, first_tokens, gateway, in_ms
from benchmarks.http_load import Exchange, StreamConnection, connected, paced
from benchmarks.machine import describe
from tests.postgres import own_server

NUM_CONNECTIONS = 8
"""Of either kind."""
RATE = 50.0
"""Good requests a second."""
NUM_ROUNDS = 4

console = Console()


class Flood:
    """Requests with bad keys, evenly at `rate` a second."""

    def __init__(self, port: int, rate: float) -> None:
        self.num_refused = 0
        self._port = port
        self._pause_s = NUM_CONNECTIONS / rate

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(self._ask()) for _ in range(NUM_CONNECTIONS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.closing(writer):
            for number in itertools.count():
                key = new_key().text
                key = key if number % 2 else key[:-1] + "!"
                head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n"
                writer.write(head.encode())
                answer = await reader.readuntil(b"\r\n\r\n")
                length = answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                self.num_refused += answer.startswith(b"HTTP/1.1 401")
                await asyncio.sleep(self._pause_s)


async def run(bench: Bench, cores: Cores, rate: float, seconds: float) -> None:
    await bench.prepare()
    async with (
        bench.worker.listening(bench.folder / "worker.sock") as address,
        gateway(bench, address, cores) as server,
    ):
        flood = Flood(server.port, rate)
        alone: list[Exchange] = []
        beside: list[Exchange] = []
        request = bench.chat(16, stream=True)
        async with connected(
            lambda: StreamConnection(request), server.port, NUM_CONNECTIONS
        ) as senders:
            await paced(senders, RATE, 1.0, seed=0)
            for number in range(1, NUM_ROUNDS + 1):
                alone += await paced(senders, RATE, seconds, seed=number)
                async with flood.running():
                    beside += await paced(senders, RATE, seconds, seed=number)
    without, under = in_ms(first_tokens(alone)), in_ms(first_tokens(beside))
    console.print(f"{len(alone)} streams each, {flood.num_refused} made-up keys refused")
    for name, before, after in zip(("p50", "p99"), without, under, strict=True):
        console.print(
            f"time to first token, {name}: {before:.2f} ms alone, {after:.2f} ms in a flood of"
            f" {rate:.0f}/s: {after / before - 1:+.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=200.0, help="made-up keys a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round")
    arguments = parser.parse_args()
    console.print(describe())
    cores = Cores()
    cores.take()
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        folder = Path(name)
        with own_server() as postgres:
            bench = Bench(folder, postgres.dsn())
            uvloop.run(run(bench, cores, arguments.rate, arguments.seconds))


if __name__ == "__main__":
    main()
