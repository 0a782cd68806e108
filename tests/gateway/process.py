"""A gateway in a process of its own, which a test may kill:
python -m tests.gateway.process DSN STORE SPOOL WORKER PORT"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import uvloop

from admin.database import EVERYTHING, Database
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.server import bind, make_server
from gateway.source import PostgresSource
from tests.gateway.service import PEPPER
from workers.client import WorkerClient


async def main() -> None:
    # It tells of each connection that it tries to make while the database is away.
    logging.getLogger("asyncpg.pool").setLevel(logging.CRITICAL)
    dsn, store, spool, worker, port = sys.argv[1:]
    database = await Database.connect(dsn, sees=EVERYTHING)
    config = GatewayConfig(model_folder=Path(store).joinpath, pepper=PEPPER, spool=Path(spool))
    app = create_app(
        config,
        source=PostgresSource(database),
        clients=[WorkerClient(worker, instance_id=config.instance_id)],
        database=database,
    )
    await make_server(app, drain_s=5).serve(sockets=[bind("127.0.0.1", int(port))])
    await database.close()


if __name__ == "__main__":
    uvloop.run(main())
