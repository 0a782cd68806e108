"""Rows of adapters without an upload, and what a gateway writes about them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from adapters.manifest import AdapterManifest
from admin.adapters import versions
from admin.adapters.versions import NewVersion
from admin.models import models
from admin.tenants import tenants
from admin.usage.credits import CreditFields
from store.database import EVERYTHING, Connection, Database
from store.queries import from_row, sql
from store.records import ServingData
from tests.adapters.files import BASE

MANIFEST = AdapterManifest(
    digest="a" * 64,
    base_digest=BASE.digest,
    max_rank=4,
    num_parameters=100,
    file_bytes=400,
    projections=("q_proj",),
    layers=(0, 1),
)
FINGERPRINT = {"tokens": [1], "logprobs": [-0.5], "effect": 0.25}
LAYOUT = "cpu/bfloat16/1"
DIGITS = "0123456789abcdef"


async def add_credit(connection: Connection, credit_id: str) -> None:
    """A correction of an hour of `tiny`, without the usage that it is of."""
    hour = datetime(2027, 1, 15, 8, tzinfo=UTC)
    credit = CreditFields(
        *("tiny", 0, 0, 0),
        id=credit_id,
        tenant_id=None,
        since=hour,
        until=hour + timedelta(hours=1),
        reason="x",
    )
    await connection.execute(sql["credit_insert"], 1, 1, 0, *msgspec.structs.astuple(credit))


class Claim(msgspec.Struct):
    tenant_id: str
    name: str
    version: int
    digest: str
    base_name: str
    base_digest: str
    attempts: int


def manifest(digit: str) -> AdapterManifest:
    return msgspec.structs.replace(MANIFEST, digest=digit * 64)


async def make_tenant(connection: Connection, name: str = "acme") -> str:
    """Its id; the base model `tiny` is there too."""
    tenant = await tenants.create_tenant(connection, name)
    await models.register_model(connection, "tiny", BASE, 512)
    return tenant.id


async def add(
    connection: Connection,
    tenant_id: str,
    digit: str,
    *,
    name: str = "bot",
    alias: str | None = None,
    serving: ServingData | None = None,
    equals_base: bool = False,
) -> int:
    """The number of a version whose content digest is `digit` repeated; it is not proved yet."""
    new = NewVersion(
        tenant_id=tenant_id,
        name=name,
        base_name="tiny",
        manifest=msgspec.structs.replace(manifest(digit), equals_base=equals_base),
        serving=serving or ServingData(),
        wanted_alias=alias,
        uploaded_by="uploader",
    )
    return (await versions.add_version(connection, new))[0]


async def claim(connection: Connection, gateway: str = "gw-1", limit: int = 100) -> list[Claim]:
    rows = await connection.fetch(sql["proving_claim"], gateway, [BASE.digest], limit)
    return [from_row(Claim, row) for row in rows]


async def prove(connection: Connection, found: Claim, worker: str = "worker-1") -> bool:
    key = (found.tenant_id, found.name, found.version)
    proof = (LAYOUT, "e" * 64, FINGERPRINT, worker)
    return await connection.fetchval(sql["proving_ready"], *key, *proof)


async def prove_all(database: Database, worker: str = "worker-1") -> int:
    """What a gateway does whose worker finds every adapter right; how many it claimed."""
    async with database.transaction() as connection:
        claimed = await claim(connection)
    for found in claimed:
        async with database.transaction() as connection:
            await prove(connection, found, worker)
    return len(claimed)


async def make_ready(connection: Connection, tenant_id: str, *digits: str) -> None:
    """Versions 1, 2, ... of `bot` with these contents, ready; `prod` is the first."""
    for digit in digits:
        await add(connection, tenant_id, digit)
        for found in await claim(connection):
            await prove(connection, found)


async def report(
    connection: Connection,
    gateway: str,
    generation: int,
    in_flight: dict[str, int],
    *,
    seconds_ago: float = 0,
) -> None:
    """A gateway says what it serves from and what it has in flight."""
    await connection.execute(
        "INSERT INTO gateways (id, generation, in_flight, seen_at)"
        " VALUES ($1, $2, $3, now() - make_interval(secs => $4))"
        " ON CONFLICT (id) DO UPDATE SET generation = excluded.generation,"
        " in_flight = excluded.in_flight, seen_at = excluded.seen_at",
        *(gateway, generation, in_flight, float(seconds_ago)),
    )


async def report_worker(
    database: Database,
    worker_id: str,
    *digests: str,
    gateway: str = "gw-1",
    seconds_ago: float = 0,
    **status: Any,
) -> None:
    """A gateway tells of a worker that has base models of these digests on its device."""
    models = [
        {
            "digest": d,
            "name": d[:4],
            "tier": "device",
            "num_bytes": 8,
            "num_swaps": 1,
            "idle_s": 2.5,
        }
        | {"load_s": 0.5, "error": "", "num_running": 1, "num_waiting": 2}
        for d in digests
    ]
    told = {"type": "status", "instance_id": worker_id, "models": models} | status
    row = {"id": worker_id, "address": f"unix:/run/{worker_id}.sock", "status": told}
    async with database.transaction(EVERYTHING) as connection:
        await connection.execute(sql["workers_report"], gateway, [row])
        await connection.execute(
            "UPDATE workers SET registered_at = now() - make_interval(secs => $2),"
            " reported_at = now() - make_interval(secs => $2) WHERE id = $1",
            *(worker_id, float(seconds_ago)),
        )
