"""A gateway in a process of its own, which a test may kill."""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import msgspec
import uvloop

from gateway.app import create_app
from gateway.catalog.catalog import POLL_INTERVAL_S, PostgresSource
from gateway.config import GatewayConfig
from store.database import EVERYTHING, Database
from tests.gateway.pepper import PEPPER
from tests.plane import Plane, free_port
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


def gateway_process(options: Options) -> Plane:
    given = msgspec.json.encode(options).decode()
    return Plane(("tests.gateway.process", given), kind="forked", port=options.port)


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
    async with Plane(app, port=options.port) as plane:
        await plane.wait()
    await database.close()


if __name__ == "__main__":
    uvloop.run(main())
