"""A gateway over a real Postgres, with a stub worker, in the test's own loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import asyncpg
import httpx

from admin.keys import keys
from gateway.app import create_app
from gateway.catalog.catalog import PostgresSource
from gateway.config import GatewayConfig
from gateway.requests.services import Gateway
from gateway.tracing import Tracing
from store.database import Database
from store.records import TENANT_SCOPES
from tests.adapters.files import BASE
from tests.admin.lifecycle import make_ready, make_tenant
from tests.doubles import make_tokenizer
from tests.gateway.pepper import PEPPER
from tests.gateway.process import Options, gateway_process
from tests.plane import Plane
from tests.postgres import server
from tests.scripted_worker import Reply, Script, ScriptedWorker
from tests.waiting import eventually
from web.held_bytes import BodyBudget
from workers.wire.client import WorkerClient
from workers.wire.protocol import Generate
from workers.wire.transport.base import Security

LIMITS_WAIT_S = 10.0
"""Ten times the default: the database of a busy machine takes longer to answer."""


def answer(_: Generate) -> Reply:
    return Reply([65, 66, 67])


class Live:
    """The base model `tiny` and the tenant acme are there; gateways come and go."""

    def __init__(self, database: Database, folder: Path, script: Script = answer) -> None:
        self.database = database
        self.worker = ScriptedWorker(f"unix:{folder / 'worker.sock'}", [BASE.digest], script)
        self.tenant_id = ""
        self.key = ""
        self.wal = folder / "spool"
        self.folder = folder
        self.max_wal_bytes = 1 << 20
        self._store = folder / "store"

    async def prepare(self) -> None:
        model = self._store / BASE.digest
        model.mkdir(parents=True)
        make_tokenizer(model)
        async with self.database.transaction() as connection:
            self.tenant_id = await make_tenant(connection)
            _, self.key = await keys.create_key(connection, PEPPER, self.tenant_id, TENANT_SCOPES)

    def process(self, dsn: str, **options: Any) -> Plane:
        """A gateway in a process of its own; `dsn` may lead to the database by way of a proxy."""
        places = {"store": str(self._store), "wal": str(self.wal)}
        return gateway_process(Options(dsn=dsn, worker=self.worker.address, **places, **options))

    def gateway(
        self,
        name: str = "gateway-1",
        *,
        workers: Sequence[str] | None = None,
        security: Security = Security(),  # noqa: B008
        poll_interval_s: float = 3600,
        trusted_proxies: Sequence[str] = (),
        bodies: BodyBudget | None = None,
        tracing: Tracing = Tracing(),  # noqa: B008
        **settings: Any,
    ) -> GatewayPlane:
        """Serves, once it has a catalog. workers: addresses of its settings; None: the one.
        settings: others of the gateway."""
        addresses = [self.worker.address] if workers is None else workers
        config = GatewayConfig(
            model_folder=self._store.joinpath,
            pepper=PEPPER,
            instance_id=name,
            security=security,
            wal=self.wal,
            max_wal_bytes=self.max_wal_bytes,
            tracing=tracing,
            **{"limits_wait_s": LIMITS_WAIT_S, **settings},
        )
        app = create_app(
            config,
            source=PostgresSource(self.database, poll_interval_s),
            clients=[
                WorkerClient(address, instance_id=name, security=security) for address in addresses
            ],
            database=self.database,
        )
        return GatewayPlane(app, self.key, trusted_proxies=trusted_proxies, bodies=bodies)

    async def limit(self, *, key: bool = False, **limits: int) -> None:
        """Of the tenant, or of its key; a minute that is limited does not end soon."""
        subject = self.key[4:16] if key else self.tenant_id
        row = {"subject": subject, "tenant_id": self.tenant_id, **limits}
        if key:
            row["key_id"] = subject
        async with self.database.transaction() as connection:
            await connection.execute("DELETE FROM quotas WHERE subject = $1", subject)
            await connection.execute(
                "INSERT INTO quotas SELECT * FROM jsonb_populate_record(NULL::quotas, $1)",
                {
                    "cached_weight": 100,
                    "weight": 1,
                    "class": "standard",
                    "updated_at": "2026-01-01T00:00:00Z",
                    **row,
                },
            )
        is_counted = any(most and name.endswith("_per_minute") for name, most in limits.items())
        if is_counted and time.time() % 60 > 45:
            await asyncio.sleep(60 - time.time() % 60)

    async def price(self, **prices: int) -> None:
        """Of `tiny`, in pico-dollars a token."""
        async with self.database.transaction() as connection:
            await connection.execute(
                "INSERT INTO prices (model, input, cached_input, output) "
                "VALUES ('tiny', $1, $2, $3)",
                *(prices["input"], prices["cached_input"], prices["output"]),
            )

    async def make_ready(self, *digits: str) -> None:
        """Versions 1, 2, ... of `bot` with these contents."""
        async with self.database.transaction() as connection:
            await make_ready(connection, self.tenant_id, *digits)

    @asynccontextmanager
    async def postgres_away(self) -> AsyncIterator[None]:
        """Nobody can connect meanwhile, and who was connected is not."""
        name = (await self.fetch("SELECT current_database() AS name"))[0]["name"]
        connection = await asyncpg.connect(server().dsn())
        try:
            await connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name
            )
            yield
        finally:
            await connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            await connection.close()

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        async with self.database.acquire() as connection:
            return list(await connection.fetch(query, *arguments))


class GatewayPlane(Plane):
    """Gateway in the test's own loop, and a client of a tenant."""

    def __init__(self, app: Any, key: str, **bounds: Any) -> None:
        super().__init__(app, **bounds)
        self.gateway: Gateway = app.gateway
        self.client: httpx.AsyncClient
        self._key = key

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.client = self.new_client(self._key)
        await eventually(lambda: self.gateway.catalog.view is not None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.aclose()
        await super().__aexit__(*error)

    async def complete(self, model: str = "bot", **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "Hi", "max_tokens": 3} | fields
        return await self.client.post("/v1/completions", json=body)

    async def serves(self, model: str) -> bool:
        return (await self.complete(model)).status_code == 200
