"""A gateway in a process of its own, which a test may kill."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

import httpx
import msgspec
import uvloop

from admin.database import EVERYTHING, Database
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.server import bind, make_server
from gateway.source import POLL_INTERVAL_S, PostgresSource
from loraplex.death import die_with_parent
from tests.gateway.service import PEPPER
from tests.stack import ROOT, free_port
from workers.client import WorkerClient

WAIT_S = 120.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    dsn: str
    store: str
    spool: str
    worker: str
    """Address."""
    port: int = msgspec.field(default_factory=free_port)
    poll_interval_s: float = POLL_INTERVAL_S
    catalog_stale_s: float = 300.0


class GatewayProcess:
    """`start` it again after a `kill`; it keeps its port."""

    def __init__(self, options: Options) -> None:
        self.url = f"http://127.0.0.1:{options.port}"
        self._options = options
        self._process: Process

    async def start(self) -> None:
        """Returns when it is ready."""
        options = msgspec.json.encode(self._options).decode()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gateway.process", options),
            cwd=ROOT,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        async with asyncio.timeout(WAIT_S), self.client() as client:
            while not await _is_ready(client):
                assert self._process.returncode is None
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """At once, also if a test has failed; nothing if it does not run."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        self._process.terminate()
        assert await self._process.wait() in (0, -signal.SIGTERM)

    def client(self, key: str = "none") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    @property
    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def main() -> None:
    # It tells of each connection that it tries to make while the database is away.
    logging.getLogger("asyncpg.pool").setLevel(logging.CRITICAL)
    options = msgspec.json.decode(sys.argv[1], type=Options)
    database = await Database.connect(options.dsn, sees=EVERYTHING)
    config = GatewayConfig(
        model_folder=Path(options.store).joinpath,
        pepper=PEPPER,
        spool=Path(options.spool),
        catalog_stale_s=options.catalog_stale_s,
    )
    app = create_app(
        config,
        source=PostgresSource(database, options.poll_interval_s),
        clients=[WorkerClient(options.worker, instance_id=config.instance_id)],
        database=database,
    )
    await make_server(app, drain_s=5).serve(sockets=[bind("127.0.0.1", options.port)])
    await database.close()


if __name__ == "__main__":
    uvloop.run(main())
