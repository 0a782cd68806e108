"""A gateway in a process of its own, which a test may kill."""

from __future__ import annotations

import logging
import resource
import signal
import sys
from pathlib import Path

import httpx
import msgspec
import uvloop

from gateway.app import create_app
from gateway.catalog.catalog import POLL_INTERVAL_S, PostgresSource
from gateway.config import GatewayConfig
from gateway.requests.services import GatewayRefusals
from store.database import EVERYTHING, Database
from tests.gateway.pepper import PEPPER
from tests.server_process import ServerProcess
from tests.stack import free_port
from web.server import bind, make_server
from workers.wire.client import WorkerClient


class Options(msgspec.Struct, frozen=True, kw_only=True):
    dsn: str
    store: str
    wal: str
    worker: str
    """Address."""
    port: int = msgspec.field(default_factory=free_port)
    poll_interval_s: float = POLL_INTERVAL_S
    catalog_stale_s: float = 300.0
    limits_wait_s: float = 1.0
    failover_wait_s: float = 30.0
    max_descriptors: int | None = None


class GatewayProcess(ServerProcess):
    """It keeps its port."""

    def __init__(self, options: Options) -> None:
        self.url = f"http://127.0.0.1:{options.port}"
        given = msgspec.json.encode(options).decode()
        super().__init__(
            (sys.executable, "-m", "tests.gateway.process", given),
            health=f"127.0.0.1:{options.port}",
        )

    async def stop(self) -> None:
        assert await self.end() in (0, -signal.SIGTERM)

    def client(self, key: str = "none") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    @property
    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10


async def main() -> None:
    # It tells of each connection that it tries to make while the database is away.
    logging.getLogger("asyncpg.pool").setLevel(logging.CRITICAL)
    options = msgspec.json.decode(sys.argv[1], type=Options)
    if options.max_descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.max_descriptors,) * 2)
    database = await Database.connect(options.dsn, sees=EVERYTHING)
    config = GatewayConfig(
        model_folder=Path(options.store).joinpath,
        pepper=PEPPER,
        wal=Path(options.wal),
        catalog_stale_s=options.catalog_stale_s,
        limits_wait_s=options.limits_wait_s,
        failover_wait_s=options.failover_wait_s,
    )
    app = create_app(
        config,
        source=PostgresSource(database, options.poll_interval_s),
        clients=[WorkerClient(options.worker, instance_id=config.instance_id)],
        database=database,
    )
    server = make_server(app, drain_s=5, metrics=GatewayRefusals())
    await server.serve(sockets=[bind("127.0.0.1", options.port)])
    await database.close()


if __name__ == "__main__":
    uvloop.run(main())
