"""A tenant's keys cannot write the audit log full."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from admin.http.plane import AdminConfig
from admin.http.tenant_rates import BURST_MINUTES, READS_PER_WRITE, TenantRates
from admin.keys.keys import create_key
from admin.tenants.tenants import create_tenant
from store.database import Database
from store.records import TENANT_SCOPES
from tests.admin.audit.test_audit import entries
from tests.admin.conftest import PEPPER
from tests.admin.lifecycle import make_ready, make_tenant
from tests.admin.serve import administration, bearing
from web.errors import RateExceeded

BURST = 2 * BURST_MINUTES


async def test_alias_flips_leave_a_bounded_number_of_rows(
    dsn: str, database: Database, tmp_path: Path
):
    """Another tenant and the operator go on."""
    own = await Database.connect(dsn)
    config = AdminConfig(pepper=PEPPER, tenant_writes_per_minute=2)
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
        other = await create_tenant(connection, "globex")
        texts = [
            (await create_key(connection, PEPPER, each, TENANT_SCOPES))[1]
            for each in (tenant_id, other.id)
        ]
    async with (
        administration(own, tmp_path / "store", config) as operator,
        AsyncExitStack() as stack,
    ):
        acme, globex = [
            await stack.enter_async_context(bearing(str(operator.base_url), text)) for text in texts
        ]
        flips = [
            await acme.put("adapters/bot/aliases/x", json={"version": 1 + number % 2})
            for number in range(3 * BURST)
        ]
        for client in (globex, operator):
            for _ in range(2 * BURST):
                assert (await client.get("adapters?tenant=globex")).status_code == 200
    await own.close()
    refused = [answer for answer in flips if answer.status_code == 429]
    rows = [row for row in await entries(database) if row.action == "alias.promote"]
    assert len(rows) == len(flips) - len(refused)
    assert BURST <= len(rows) <= 2 * BURST
    assert refused[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused[-1].headers["retry-after"]) >= 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_has_its_rate_and_a_burst():
    clock = Clock()
    rates = TenantRates(2, clock)
    for _ in range(BURST):
        rates.take("ten_a", is_write=True)
    with pytest.raises(RateExceeded) as refused:
        rates.take("ten_a", is_write=True)
    assert refused.value.retry_after_s == pytest.approx(30.0)
    rates.take("ten_b", is_write=True)
    clock.now += 30.0
    for _ in range(READS_PER_WRITE):
        rates.take("ten_a", is_write=False)
    with pytest.raises(RateExceeded):
        rates.take("ten_a", is_write=False)
