"""Gateways whose machine has another time than the database keep the database's windows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest

from admin.keys import keys
from admin.keys.schemas import KeyCreate
from gateway.limits.database_clock import DatabaseClock
from store.records import TENANT_SCOPES
from tests.gateway.limits.test_quotas import limited
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.metering.test_usage import rows
from tests.gateway.pepper import PEPPER
from tests.waiting import eventually

DAY_S = 86_400.0
SHIFTS_S = [120.0, 40 * DAY_S]
"""Of three gateways one is so far ahead, one as far behind, and one is right."""


def shifted(by_s: float) -> Callable[[], float]:
    return lambda: time.time() + by_s


def test_an_exchange_bounds_the_time() -> None:
    clock = DatabaseClock(shifted(1000))
    sent_at = time.monotonic()
    clock.note_exchange(sent_at, 5000.0, sent_at + 0.5)
    assert 4999.4 < clock() - (time.monotonic() - sent_at) < 5000.1
    # One that takes long says less, and what is known stays.
    before = clock() - time.monotonic()
    clock.note_exchange(sent_at, 5003.0, sent_at + 10)
    assert clock() - time.monotonic() == pytest.approx(before, abs=0.01)
    # The database's clock was set.
    clock.note_exchange(sent_at, 6000.0, sent_at + 0.5)
    assert 5999.4 < clock() - (time.monotonic() - sent_at) < 6000.1


def test_a_clock_that_is_set_moves_nothing() -> None:
    at = [1000.0]
    clock = DatabaseClock(lambda: at[0])
    before = clock() - time.monotonic()
    at[0] += 3600
    assert clock() - time.monotonic() == pytest.approx(before, abs=0.01)
    assert 3590 < clock.difference_s < 3600.1


def test_a_difference_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shift_s = [0.0]
    clock = DatabaseClock(lambda: time.time() + shift_s[0])
    for shift_s[0] in (0.0, 4.0, -120.0, -121.0, 0.0, 0.5, 7.0):
        sent_at = time.monotonic()
        clock.note_exchange(sent_at, time.time(), time.monotonic())
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "INFO", "WARNING"]
    assert "is 120.0 s behind the database's" in told[0][1]
    assert "agrees" in told[1][1] and "is 7.0 s ahead of" in told[2][1]


async def told(plane: GatewayPlane) -> None:
    """The gateway knows the database's time."""
    await eventually(lambda: abs(plane.gateway.clock() - time.time()) < 1)


@pytest.mark.full
@pytest.mark.parametrize("shift_s", SHIFTS_S)
@pytest.mark.parametrize("kind", ["requests_per_minute", "tokens_per_minute", "tokens_per_day"])
async def test_a_limit_holds_over_gateways_with_different_clocks(
    live: Live, kind: str, shift_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    each = 1 if kind == "requests_per_minute" else 2 + 3
    async with live.worker, AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(live.gateway(f"gateway-{i}", clock=shifted(by_s)))
            for i, by_s in enumerate((shift_s, 0.0, -shift_s))
        ]
        for plane in gateways:
            await told(plane)
            await limited(live, plane, **{kind: 6 * each})
        statuses = [
            (await plane.complete("tiny")).status_code for _ in range(4) for plane in gateways
        ]
        assert statuses.count(200) <= 6 and statuses.count(429) >= 6
        assert statuses.count(200) + statuses.count(429) == len(statuses)
        assert statuses[:3] == [200] * 3
        for row in await rows(live, statuses.count(200)):
            assert abs(row["admitted_at"] - datetime.now(UTC)) < timedelta(seconds=60)
        assert abs(gateways[0].gateway.state.clock_difference_s - shift_s) < 1
    assert caplog.text.count("this machine's clock is") == 2


async def test_a_clock_may_be_set_while_requests_are_counted(live: Live) -> None:
    shift_s = [0.0]
    async with live.worker, live.gateway(clock=lambda: time.time() + shift_s[0]) as plane:
        await told(plane)
        await limited(live, plane, requests_per_minute=4)
        statuses: list[int] = []
        for shift_s[0] in (0.0, 3600.0, -3600.0, 61.0, -61.0, 86_400.0):
            statuses.append((await plane.complete("tiny")).status_code)
            # A renewal in between.
            await asyncio.sleep(0.1)
        assert statuses == [200] * 4 + [429] * 2


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
async def test_a_key_begins_and_ends_by_the_databases_clock(live: Live, shift_s: float) -> None:
    """As soon as the gateway has its first answer from it."""
    now, hour = datetime.now(UTC), timedelta(hours=1)
    ends_at = now + timedelta(seconds=5)
    rights = {
        "ended": KeyCreate(TENANT_SCOPES, expires_at=ends_at),
        "lives": KeyCreate(TENANT_SCOPES, not_before=now - hour / 2, expires_at=now + hour / 2),
        "begins": KeyCreate(TENANT_SCOPES, not_before=now + hour / 2),
    }
    issued: dict[str, str] = {}
    async with live.database.transaction() as connection:
        for name, right in rights.items():
            issued[name] = (await keys.issue_key(connection, PEPPER, live.tenant_id, right))[1]
    async with live.worker, live.gateway(clock=shifted(shift_s)) as plane:
        await told(plane)
        await eventually(lambda: len(plane.gateway.catalog.current.keys) == 4)
        await asyncio.sleep((ends_at - datetime.now(UTC)).total_seconds() + 0.1)
        for name, key in issued.items():
            headers = {"authorization": f"Bearer {key}"}
            answer = await plane.client.get("/v1/models", headers=headers)
            assert answer.status_code == (200 if name == "lives" else 401), name
