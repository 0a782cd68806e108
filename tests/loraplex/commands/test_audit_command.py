"""`loraplex audit` and the limits of `loraplex key`, as processes against a live admin plane."""

from __future__ import annotations

import json

from admin.audit import audit
from store.database import Database
from tests.admin.audit.test_audit import unlocked
from tests.admin.conftest import PEPPER, Plane
from tests.loraplex.commands.test_cli import run


async def test_keys_with_limits_and_rotation(plane: Plane):
    await run(plane, "tenant", "create", "acme")
    limits = ("--model", "bot", "--model", "tiny", "--cidr", "127.0.0.0/8")
    ends = ("--not-before", "2026-01-01T00:00:00Z", "--expires-at", "2999-01-01T00:00:00Z")
    await run(plane, "key", "create", "--tenant", "acme", *limits, *ends)
    (old,) = json.loads(await run(plane, "key", "list", "--tenant", "acme", "--json"))
    assert (old["models"], old["cidrs"]) == (["bot", "tiny"], ["127.0.0.0/8"])
    assert (old["not_before"], old["expires_at"]) == (ends[1], ends[3])
    text = (await run(plane, "key", "rotate", old["id"], "--overlap", "0")).strip()
    assert (await plane.bearing(text).get("models")).status_code == 200
    assert "only a key that is valid" in await run(plane, "key", "rotate", old["id"], code=1)
    assert "'home' does not appear" in await run(
        plane, "key", "create", "--admin", "--cidr", "home", code=1
    )


async def test_the_log_is_listed_and_verified(plane: Plane, owner: Database):
    for name in ("acme", "globex"):
        await plane.client.post("tenants", json={"name": name})
    listed = json.loads(await run(plane, "audit", "list", "--tenant", "acme", "--json"))
    assert [entry["action"] for entry in listed] == ["tenant.create"]
    assert "globex" in await run(plane, "audit", "list")
    lines = (await run(plane, "audit", "export")).splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["seq"] for entry in entries] == [1, 2, 3]
    assert (await run(plane, "audit", "export", "--after", "2")).splitlines() == lines[2:]
    assert (await run(plane, "audit", "export", "--tenant", "acme")).count("\n") == 1
    told, anchor = (await run(plane, "audit", "verify")).splitlines()
    assert told == "3 entries are unchanged since they were written"
    assert await run(plane, "audit", "verify", "--anchor", anchor)
    async with unlocked(owner) as connection:
        await connection.execute("DELETE FROM audit_log WHERE seq = 3")
    assert (await run(plane, "audit", "verify")).startswith("2 entries")
    assert "entry 3" in await run(plane, "audit", "verify", "--anchor", anchor, code=1)
    async with unlocked(owner) as connection:
        await connection.execute("UPDATE audit_log SET object = 'x' WHERE seq = 2")
    broken = await run(plane, "audit", "verify", code=1)
    assert "entry 2 of the audit log: it is not what was written" in broken
    assert "SEQ:HASH" in await run(plane, "audit", "verify", "--anchor", "3", code=2)


async def test_an_anchor_that_is_pruned_is_too_old(plane: Plane, owner: Database):
    await plane.client.post("tenants", json={"name": "acme"})
    _, anchor = (await run(plane, "audit", "verify")).splitlines()
    seq, hash = anchor.split(":")
    async with unlocked(owner) as connection:
        await connection.execute("UPDATE audit_log SET at = at - interval '70 days'")
        seal = audit.seal(PEPPER, int(seq), bytes.fromhex(hash)).hex()
        await connection.execute("SELECT audit_prune($1, $2, $3)", int(seq), hash, seal)
    assert (await run(plane, "audit", "verify")).startswith("1 entries")
    told = await run(plane, "audit", "verify", "--anchor", anchor, code=1)
    assert f"entry {seq} has been pruned" in told
