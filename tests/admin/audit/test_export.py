"""The export of the audit log: each entry once and in order, in bounded memory, and resumable."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from admin.audit import routes
from admin.audit.audit import AuditView
from tests.admin.conftest import Plane


async def exported(client: httpx.AsyncClient, **query: object) -> list[AuditView]:
    answer = await client.get("audit/export", params={k: str(v) for k, v in query.items()})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [msgspec.json.decode(line, type=AuditView) for line in answer.text.splitlines()]


@pytest.mark.parametrize("at_once", [1, 3, 500])
async def test_an_export_has_each_entry_once(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(routes, "ROWS_AT_ONCE", at_once)
    for number in range(7):
        made = await plane.client.post("tenants", json={"name": f"tenant-{number}"})
    listed = (await plane.client.get("audit", params={"limit": 100})).json()["data"]
    whole = await exported(plane.client)
    assert [entry.seq for entry in whole] == [entry["seq"] for entry in reversed(listed)]
    assert [entry.hash for entry in whole] == [entry["hash"] for entry in reversed(listed)]
    assert await exported(plane.client, after=whole[3].seq) == whole[4:]
    assert await exported(plane.client, after=whole[-1].seq) == []
    (own,) = await exported(plane.client, tenant=made.json()["id"])
    assert own.action == "tenant.create"


async def test_a_tenant_s_key_exports_nothing(plane: Plane) -> None:
    acme = await plane.tenant("acme")
    assert (await acme.get("audit/export")).status_code == 403
