"""Refused keys are in the audit log: a few entries for any number of requests, with the key if it
exists, and without anything that a stranger chose."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar

from adapters.store.folder import LocalStore
from admin.audit.audit import AuditView
from admin.http.plane import AdminPlane
from admin.keys import keys
from admin.keys.schemas import KeyCreate
from store.database import Database
from store.errors import ApiError
from store.periodic import in_background
from store.queries import sql
from store.records import TENANT_SCOPES, new_key
from tests.admin.audit.test_audit import entries, verified
from tests.admin.audit.test_export import exported
from tests.admin.conftest import CONFIG, PEPPER, Plane
from tests.waiting import eventually
from web import refused_keys
from web.errors import Forbidden, Unauthenticated
from web.refused_keys import RefusedKeys

NUM_INVENTED = 5000


def plane_of(app: Litestar) -> AdminPlane:
    return app.state.admin


async def refusals(database: Database) -> list[AuditView]:
    """Oldest first. The chain must verify with them."""
    assert (await verified(database)).broken is None
    return [entry for entry in await entries(database) if entry.action == "key.refuse"]


def scope_of(address: str | None, request_id: str = "req_1") -> dict[str, Any]:
    client = None if address is None else (address, 1)
    return {"client": client, "state": {"request_id": request_id, "started_at": 0.0}}


async def refused(
    client: httpx.AsyncClient, key: str, path: str = "tenants", status: int = 401
) -> str:
    """The id of the request."""
    answer = await client.get(path, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
    return answer.headers["x-request-id"]


async def test_each_kind_of_refusal_has_its_entry(plane: Plane, app: Litestar) -> None:
    acme = (await plane.client.post("tenants", json={"name": "acme"})).json()
    made = {name: await plane.key("acme") for name in ("revoked", "lacks", "forged")}
    made["elsewhere"] = await plane.key("acme", scopes=["usage:read"], cidrs=["203.0.113.0/24"])
    texts = {name: str(key["key"]) for name, key in made.items()}
    now = datetime.now(UTC)
    async with plane.database.transaction() as connection:
        for name, rights in {
            "expired": KeyCreate(TENANT_SCOPES, expires_at=now - timedelta(seconds=1)),
            "early": KeyCreate(TENANT_SCOPES, not_before=now + timedelta(hours=1)),
        }.items():
            _, texts[name] = await keys.issue_key(connection, PEPPER, acme["id"], rights)
        await keys.revoke_key(connection, texts["revoked"].split("_")[1])
    # The id of a key that exists, with a secret of another one.
    invented = new_key().text
    forged = new_key().text.split("_")
    forged[1] = texts["forged"].split("_")[1]
    expected = {
        await refused(plane.client, texts["revoked"]): ("revoked", "revoked"),
        await refused(plane.client, texts["expired"]): ("expired", "expired"),
        await refused(plane.client, texts["early"]): ("early", "not_yet_valid"),
        await refused(plane.client, texts["lacks"], status=403): ("lacks", "insufficient_scope"),
        await refused(plane.client, texts["elsewhere"], status=403): (
            "elsewhere",
            "ip_not_allowed",
        ),
        await refused(plane.client, invented): (None, "unknown"),
    }
    await refused(plane.client, "_".join(forged))
    await refused(plane.client, "sk-" + "x" * 2000)
    assert (await plane.client.get("tenants", headers={"authorization": ""})).status_code == 401
    assert await refusals(plane.database) == []
    await plane_of(app).refused_keys.write(plane.database)

    found = await refusals(plane.database)
    assert len(found) == len(expected)
    for entry in found:
        name, reason = expected[str(entry.request_id)]
        key_id = "unknown" if name is None else texts[name].split("_")[1]
        assert (entry.object, entry.key_id) == (key_id, key_id)
        assert entry.tenant_id == (None if name is None else acme["id"])
        assert (entry.address, entry.details["process"]) == ("127.0.0.1", "admin")
        number = 3 if name is None else 1
        assert (entry.details["reason"], entry.details["requests"]) == (reason, number)
    # Nothing of an invented or malformed key is kept.
    secrets = [*(text.split("_")[2] for text in texts.values()), invented, "sk-", *forged[2:]]
    assert not any(secret in str(found) for secret in secrets)
    # Readable as any other entry.
    listed = (await plane.client.get("audit", params={"tenant": acme["id"]})).json()["data"]
    assert {row["object"] for row in listed if row["action"] == "key.refuse"} == {
        texts[name].split("_")[1] for name, _ in expected.values() if name is not None
    }
    assert [e.seq for e in await exported(plane.client) if e.action == "key.refuse"] == [
        entry.seq for entry in found
    ]
    # Nothing is left to write.
    await plane_of(app).refused_keys.write(plane.database)
    assert len(await refusals(plane.database)) == len(found)


async def test_a_flood_of_invented_keys_is_one_entry(plane: Plane, app: Litestar) -> None:
    texts = iter([new_key().text for _ in range(NUM_INVENTED)])
    count = plane_of(app).refused_keys

    async def flood() -> None:
        for text in texts:
            await refused(plane.client, text)

    await asyncio.gather(*(flood() for _ in range(20)))
    await count.write(plane.database)
    (entry,) = await refusals(plane.database)
    assert (entry.object, entry.address) == ("unknown", "127.0.0.1")
    assert (entry.details["reason"], entry.details["requests"]) == ("unknown", NUM_INVENTED)


async def test_a_flood_from_many_addresses_is_bounded(database: Database) -> None:
    """A key that exists is named although many unknown ones are presented."""
    async with database.transaction() as connection:
        key, text = await keys.create_key(connection, PEPPER, None)
    count = RefusedKeys("gateway-1", PEPPER)
    count.note(scope_of("198.51.100.1"), f"Bearer {text}", Forbidden("no"))
    for number in range(NUM_INVENTED):
        for _ in range(2 if number < 20 else 1):
            address = f"2001:db8:{number:x}::{number:x}"
            count.note(scope_of(address), f"Bearer {new_key().text}", Unauthenticated("no"))
    await count.write(database)
    found = await refusals(database)
    assert len(found) == refused_keys.MAX_ENTRIES
    assert sum(entry.details["requests"] for entry in found) == 1 + NUM_INVENTED + 20
    assert found[0].object == key.id
    (rest,) = [entry for entry in found if entry.details["reason"] == "various"]
    assert (rest.address, rest.request_id) == (None, None)
    assert all(len(entry.address or "") <= 45 for entry in found)


async def test_addresses_of_one_subscriber_are_one_entry(database: Database) -> None:
    count = RefusedKeys("gateway-1", PEPPER)
    for number in range(1, 100):
        scope = scope_of(f"2001:db8::{number:x}", f"req_{number}")
        count.note(scope, f"Bearer {new_key().text}", Unauthenticated("no"))
    count.note(scope_of(None), "Bearer bad", Unauthenticated("no"))
    await count.write(database)
    one, other = await refusals(database)
    assert (one.address, one.request_id) == ("2001:db8::1", "req_1")
    assert (one.details["requests"], other.address) == (99, None)


async def test_counts_outlive_a_failed_write(database: Database, dsn: str) -> None:
    count = RefusedKeys("gateway-1", PEPPER)
    count.note(scope_of("198.51.100.1", "req_1"), "Bearer bad", Unauthenticated("no"))
    away = await Database.connect(dsn)
    await away.close()
    with pytest.raises(ApiError):
        await count.write(away)
    count.note(scope_of("198.51.100.1", "req_2"), "Bearer bad", Unauthenticated("no"))
    await count.write(database)
    (entry,) = await refusals(database)
    assert (entry.request_id, entry.details["requests"]) == ("req_1", 2)


async def test_no_more_entries_are_written_by_the_role(database: Database) -> None:
    row = {"key_id": None, "details": {}}
    with pytest.raises(ApiError, match="more than 100"):
        async with database.transaction() as connection:
            await connection.execute(sql["audit_refused_keys"], [row] * 101)
    assert await refusals(database) == []


async def test_the_admin_plane_writes_at_intervals(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_keys, "INTERVAL_S", 0.05)
    plane = AdminPlane(CONFIG, database, LocalStore(tmp_path / "store"))

    async def are_written(number: int) -> bool:
        return len(await refusals(database)) == number

    async with in_background(plane.run()):
        for number in (1, 2):
            plane.refused_keys.note(scope_of("198.51.100.1"), "Bearer bad", Unauthenticated("no"))
            await eventually(partial(are_written, number))


async def test_the_admin_plane_writes_when_it_ends(database: Database, tmp_path: Path) -> None:
    plane = AdminPlane(CONFIG, database, LocalStore(tmp_path / "store"))
    async with in_background(plane.run()):
        await asyncio.sleep(0.5)
        plane.refused_keys.note(scope_of("198.51.100.1"), "Bearer bad", Unauthenticated("no"))
        assert await refusals(database) == []
    assert len(await refusals(database)) == 1
