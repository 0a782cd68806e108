"""The audit log does not grow for ever, its chain is verified past what was pruned, and each row
says where its change came from."""

from __future__ import annotations

import pytest

from admin.audit import audit
from admin.audit.retention import prune_old
from admin.tenants import tenants
from store.database import Connection, Database
from store.errors import ApiError
from tests.admin.audit.test_audit import entries, unlocked, verified
from tests.admin.conftest import PEPPER, Plane

DAYS = 60
NUM_OLD = 7


async def write(database: Database, count: int, prefix: str) -> None:
    async with database.transaction() as connection:
        for i in range(count):
            await tenants.create_tenant(connection, f"{prefix}-{i}")


async def age_all(connection: Connection) -> None:
    """Makes the chain one that was written 70 days ago."""
    last = audit.BEGINNING
    await connection.execute("UPDATE audit_log SET at = at - interval '70 days'")
    for row in await connection.fetch(
        "SELECT *, details::text AS text FROM audit_log ORDER BY seq"
    ):
        hash = audit.chain_hash({**row, "details": row["text"], "prev": last})
        await connection.execute(
            "UPDATE audit_log SET prev = $2, hash = $3 WHERE seq = $1", row["seq"], last, hash
        )
        last = hash


@pytest.fixture
async def aged(database: Database, owner: Database) -> Database:
    """Seven rows that are 70 days old and five new ones, in one whole chain."""
    await write(database, NUM_OLD, "old")
    async with unlocked(owner) as connection:
        await age_all(connection)
    await write(database, 5, "new")
    assert (await verified(database)).broken is None
    return database


async def test_old_rows_go_some_at_a_time_and_the_rest_verifies(aged: Database):
    assert await prune_old(aged, PEPPER, DAYS, limit=4) == 4
    assert await prune_old(aged, PEPPER, DAYS, limit=4) == 3
    assert await prune_old(aged, PEPPER, DAYS, limit=4) == 0
    left = await entries(aged)
    assert [entry.seq for entry in left] == list(range(NUM_OLD + 1, NUM_OLD + 8))
    assert [entry.action for entry in left[-2:]] == ["audit.prune"] * 2
    for part in (1, 3, 100):
        seen = await verified(aged, part)
        assert (seen.broken, seen.seq, seen.pruned) == (None, NUM_OLD + 7, NUM_OLD)


async def test_a_log_of_old_rows_alone_goes_on_after_them(database: Database, owner: Database):
    """A server that nothing was changed on for longer than rows are kept."""
    await write(database, NUM_OLD, "old")
    async with unlocked(owner) as connection:
        await age_all(connection)
    assert await prune_old(database, PEPPER, DAYS) == NUM_OLD
    (only,) = await entries(database)
    assert (only.seq, only.action) == (NUM_OLD + 1, "audit.prune")
    await write(database, 1, "new")
    seen = await verified(database)
    assert (seen.broken, seen.seq, seen.pruned) == (None, NUM_OLD + 2, NUM_OLD)


async def test_young_rows_stay(aged: Database):
    """Also where the plane is made to ask for them, and those that one day has made old."""
    assert await prune_old(aged, PEPPER, 100) == 0
    assert await prune_old(aged, PEPPER, 70) == 0
    with pytest.raises(ApiError, match="too young"):
        await prune_old(aged, PEPPER, -2)
    assert len(await entries(aged)) == NUM_OLD + 5


FORGERIES = {
    "another row": "details || jsonb_build_object('hash', encode(sha256('x'), 'hex'))",
    "another seal": "details || jsonb_build_object('seal', encode(sha256('x'), 'hex'))",
    "no seal": "details - 'seal'",
    "no text": "details || jsonb_build_object('seal', 'zz')",
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forged_checkpoint_is_found(aged: Database, owner: Database, forgery: str):
    assert await prune_old(aged, PEPPER, DAYS) == NUM_OLD
    async with unlocked(owner) as connection:
        await connection.execute(
            f"UPDATE audit_log SET details = {FORGERIES[forgery]} WHERE action = 'audit.prune'"
        )
    seen = await verified(aged)
    assert seen.reason is not None and "forged" in seen.reason


async def test_who_owns_the_database_cannot_prune_unseen(aged: Database, owner: Database):
    """With the database's own function, whose seal it cannot make."""
    (old,) = [entry for entry in await entries(aged) if entry.seq == 3]
    async with owner.acquire() as connection:
        await connection.execute("SELECT audit_prune(3, $1, $2)", old.hash, bytes(32).hex())
    seen = await verified(aged)
    assert seen.reason is not None and "forged" in seen.reason


async def test_a_checkpoint_that_is_missing_is_found(aged: Database, owner: Database):
    assert await prune_old(aged, PEPPER, DAYS) == NUM_OLD
    async with unlocked(owner) as connection:
        await connection.execute("DELETE FROM audit_log WHERE action = 'audit.prune'")
    assert (await verified(aged)).broken == 1


async def test_rows_after_the_checkpoint_that_are_missing_are_found(
    aged: Database, owner: Database
):
    assert await prune_old(aged, PEPPER, DAYS) == NUM_OLD
    async with unlocked(owner) as connection:
        await connection.execute("DELETE FROM audit_log WHERE seq = $1", NUM_OLD + 1)
    assert (await verified(aged)).broken == NUM_OLD + 1


async def test_what_was_rewritten_is_not_pruned(aged: Database, owner: Database):
    """A prune would hide it."""
    async with unlocked(owner) as connection:
        await connection.execute("UPDATE audit_log SET object = 'x' WHERE seq = 2")
    with pytest.raises(ApiError, match="entry 2 of the audit log"):
        await prune_old(aged, PEPPER, DAYS)
    assert (await verified(aged)).broken == 2


async def test_a_row_says_where_its_change_came_from(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    listed = (await plane.client.get("audit", params={"limit": 2})).json()["data"]
    assert [entry["address"] for entry in listed] == ["127.0.0.1", None]
    assert (await verified(plane.database)).broken is None
