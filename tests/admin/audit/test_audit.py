"""The audit log: every change is in it, and no change of it goes unseen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from admin.audit import audit
from admin.audit.audit import AuditView, VerificationView
from admin.keys import keys
from admin.tenants import tenants
from store.database import Connection, Database
from store.errors import ApiError, Invalid
from store.queries import sql
from tests.admin.calls import ROUTES
from tests.admin.conftest import PEPPER, Plane
from tests.admin.lifecycle import make_ready, make_tenant
from tests.admin.recorded import recorder
from tests.scale import scaled

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
STAGES_BYTES = {"POST /uploads", "PATCH /uploads/{upload_id}", "DELETE /uploads/{upload_id}"}
"""They change no row: what comes of them is logged when a version is made, or expires."""


async def entries(database: Database, **filters: Any) -> list[AuditView]:
    """Oldest first."""
    wanted = {"tenant_id": None, "object": None, "before": None, "limit": 1000} | filters
    async with database.acquire() as connection:
        return (await audit.list_entries(connection, **wanted))[::-1]


async def verified(database: Database, part: int = 100) -> VerificationView:
    """Part by part, as the command line does it."""
    after = 0
    async with database.acquire() as connection:
        while True:
            seen = await audit.verify(connection, PEPPER, after, part)
            if seen.broken is not None or seen.seq >= seen.newest or seen.seq == after:
                return seen
            after = seen.seq


@asynccontextmanager
async def unlocked(owner: Database) -> AsyncIterator[Connection]:
    """What somebody can do who owns the database."""
    async with owner.transaction() as connection:
        await connection.execute("ALTER TABLE audit_log DISABLE TRIGGER only_grows")
        yield connection
        await connection.execute("ALTER TABLE audit_log ENABLE TRIGGER only_grows")


async def test_every_route_that_changes_something_leaves_a_row(tmp_path: Path):
    """With the caller's key and the id that the answer bears."""
    async with recorder(tmp_path) as made:
        for route in ROUTES:
            if route.method == "GET" or route.name in STAGES_BYTES:
                continue
            async with made.copy() as plane:
                path, arguments = route.request(made.furnished.values, is_named=True)
                admin = made.callers["administrator"]
                answer = await admin.request(route.method, made.url + path, **arguments)
                assert answer.is_success, (route.name, answer.text)
                request_id = answer.headers["x-request-id"]
                key_ids = {
                    entry.key_id
                    for entry in await entries(plane.database)
                    if entry.request_id == request_id
                }
                assert key_ids == {admin.headers["authorization"].split("_")[1]}, route.name
                assert (await verified(plane.database)).broken is None


async def test_the_log_is_paged_and_filtered(plane: Plane):
    ids = [
        (await plane.client.post("tenants", json={"name": name})).json()["id"]
        for name in ("acme", "globex")
    ]
    await plane.client.patch("tenants/acme", json={"sharing_group": "family"})
    listed = (await plane.client.get("audit", params={"limit": 2})).json()
    assert [entry["action"] for entry in listed["data"]] == ["tenant.update", "tenant.create"]
    assert listed["has_more"] and listed["data"][0]["details"] == {
        "sharing_group": [None, "family"]
    }
    older = {"after": listed["data"][-1]["seq"], "limit": 1}
    assert (await plane.client.get("audit", params=older)).json()["data"][0]["object"] == ids[0]
    own = (await plane.client.get("audit", params={"tenant": ids[0]})).json()["data"]
    assert [entry["action"] for entry in own] == ["tenant.update", "tenant.create"]
    one = (await plane.client.get("audit", params={"object": ids[1]})).json()["data"]
    assert [entry["action"] for entry in one] == ["tenant.create"]


async def test_what_is_refused_or_changes_nothing_leaves_no_row(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    before = await entries(plane.database)
    assert (await plane.client.post("tenants", json={"name": "acme"})).status_code == 409
    await plane.client.patch("tenants/acme", json={"sharing_group": None})
    await plane.client.post("tenants/acme/keys", json={"scopes": ["root"]})
    assert await entries(plane.database) == before


async def test_no_secret_is_logged(database: Database):
    async with database.transaction() as connection:
        tenant = await tenants.create_tenant(connection, "acme")
        key, text = await keys.create_key(connection, PEPPER, tenant.id, frozenset({"inference"}))
        await keys.rotate_key(connection, PEPPER, key.id, 60)
        await keys.revoke_key(connection, key.id)
    async with database.acquire() as connection:
        rows = await connection.fetch("SELECT audit_log::text AS row FROM audit_log")
    assert len(rows) >= 5
    secrets = (text, text[17:], key.hash.hex())
    assert not [secret for secret in secrets for row in rows if secret in row["row"]]


async def test_what_gateways_do_by_themselves_is_logged(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
        alias = (tenant_id, "bot", "prod")
        canary = (1, {"1": 9, "2": 1}, None, "somebody", "canary", None, None)
        move = await connection.fetchval(sql["alias_point"], *alias, *canary)
    async with database.acquire() as connection:
        await connection.fetchval(sql["canary_roll_back"], *alias, 1, "too many errors", move)
    last = (await entries(database, object="bot@prod"))[-1]
    assert (last.action, last.key_id, last.tenant_id) == (
        "alias.auto_rollback",
        "system",
        tenant_id,
    )
    assert last.details["detail"] == "too many errors"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_log SET action = 'nothing' WHERE seq = 1",
        "DELETE FROM audit_log WHERE seq = 1",
        "DELETE FROM audit_log WHERE false",
        "TRUNCATE audit_log",
    ],
)
async def test_the_log_only_grows(database: Database, owner: Database, statement: str):
    """Even for its owner, unless it is unlocked; others are not allowed to try."""
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    with pytest.raises(Invalid, match="only grows"):
        async with owner.transaction() as connection:
            await connection.execute(statement)
    with pytest.raises(ApiError, match="permission denied"):
        async with database.transaction() as connection:
            await connection.execute(statement)
    assert len(await entries(database)) == 1


async def test_an_entry_cannot_be_forged(database: Database, owner: Database):
    """Whatever an INSERT says of place, time and hash, the chain goes on."""
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    async with owner.transaction() as connection:
        await connection.execute(
            "INSERT INTO audit_log (seq, at, key_id, action, object, details, prev, hash)"
            " VALUES (99, '2020-01-01', 'someone', 'x', 'y', '{}', $1, $1)",
            bytes(32),
        )
    last = (await entries(database))[-1]
    assert (last.seq, last.key_id, last.at.year > 2020) == (2, "system", True)
    assert (await verified(database)).broken is None


TAMPERING = {
    "UPDATE audit_log SET details = '{}' WHERE seq = 5": (5, "not what was written"),
    "UPDATE audit_log SET key_id = key_id || ' ' WHERE seq = 5": (5, "not what was written"),
    "UPDATE audit_log SET tenant_id = NULL WHERE seq = 5": (5, "not what was written"),
    "UPDATE audit_log SET at = at + interval '1 microsecond' WHERE seq = 5": (5, "not what"),
    "UPDATE audit_log SET address = '203.0.113.9' WHERE seq = 5": (5, "not what was written"),
    "UPDATE audit_log SET hash = sha256(hash) WHERE seq = 5": (5, "not what was written"),
    "UPDATE audit_log SET prev = sha256(prev) WHERE seq = 5": (5, "does not follow"),
    "DELETE FROM audit_log WHERE seq = 5": (5, "missing"),
    "DELETE FROM audit_log WHERE seq = 1": (1, "missing"),
}


@pytest.mark.parametrize("statement", TAMPERING)
@pytest.mark.parametrize("part", [2, 4, 100])
async def test_what_was_rewritten_is_found(
    database: Database, owner: Database, statement: str, part: int
):
    async with database.transaction() as connection:
        for i in range(9):
            await tenants.create_tenant(connection, f"tenant-{i}")
    assert (await verified(database, part)).broken is None
    async with unlocked(owner) as connection:
        await connection.execute(statement)
    seq, reason = TAMPERING[statement]
    seen = await verified(database, part)
    assert seen.broken == seq
    assert seen.reason is not None and reason in seen.reason


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.tuples(
    *(TEXT, st.none() | TEXT, TEXT, TEXT, st.dictionaries(TEXT, JSON, max_size=3), TEXT, TEXT)
)


@settings(
    max_examples=scaled(25, 500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(written=st.lists(ENTRY, min_size=1, max_size=5))
async def test_both_ways_to_hash_agree(owner: Database, written: list[tuple[Any, ...]]):
    """The database's and ours, of whatever text and JSON there is."""
    async with owner.acquire() as connection:
        after: int = await connection.fetchval(sql["audit_newest"])
    for key_id, tenant_id, action, name, details, request_id, address in written:
        async with owner.transaction() as connection:
            await connection.execute(sql["audit_actor"], key_id, request_id, address)
            await connection.execute(
                "INSERT INTO audit_log (tenant_id, action, object, details)"
                " VALUES ($1, $2, $3, $4)",
                *(tenant_id, action, name, details),
            )
    async with owner.acquire() as connection:
        seen = await audit.verify(connection, PEPPER, after, 100)
    assert (seen.broken, seen.seq) == (None, after + len(written))


@given(one=ENTRY, other=ENTRY)
def test_no_two_entries_read_the_same(one: tuple[Any, ...], other: tuple[Any, ...]):
    """Also where the border between two fields could be meant to lie elsewhere."""

    def hashed(entry: tuple[Any, ...]) -> bytes:
        key_id, tenant_id, action, name, details, request_id, address = entry
        row = {"seq": 1, "at": audit.EPOCH, "prev": bytes(32), "details": json.dumps(details)}
        row |= {"key_id": key_id, "tenant_id": tenant_id, "action": action, "object": name}
        row |= {"request_id": request_id or None, "address": address or None}
        return audit.chain_hash(row)

    key_id, tenant_id, action, name, details, request_id, address = one
    shifted = (key_id, tenant_id, action + name[:1], name[1:], details, request_id, address)
    assert (hashed(one) == hashed(shifted)) == (one == shifted)
    assert (hashed(one) == hashed(other)) == (one == other)


async def test_eight_writers_make_one_chain(database: Database):
    async def write(writer: int) -> None:
        for i in range(10):
            async with database.transaction() as connection:
                tenant = await tenants.create_tenant(connection, f"tenant-{writer}-{i}")
                await keys.create_key(connection, PEPPER, tenant.id, frozenset({"inference"}))
            if i % 3 == 0:
                async with database.transaction() as connection:
                    await tenants.delete_tenant(connection, tenant)

    await asyncio.gather(*(write(writer) for writer in range(8)))
    seen = await verified(database)
    assert (seen.broken, seen.seq, seen.newest) == (None, 192, 192)
    times = [entry.at for entry in await entries(database)]
    assert times == sorted(times)
