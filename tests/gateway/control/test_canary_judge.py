"""Canary sets are judged by what became of their requests, and go back by themselves."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admin.adapters import aliases
from gateway.catalog.catalog import Catalog, PostgresSource
from gateway.control.canary_judge import CanaryJudge, judge
from gateway.metering.canary_outcomes import NUM_STEPS, Outcomes, Tally, median_ms, ttft_step
from store.database import EVERYTHING, Database
from store.queries import sql
from store.records import Alias, CanaryPolicy
from tests.gateway.live import GatewayPlane, Live, answer
from tests.scripted_worker import Reply
from tests.waiting import eventually
from workers.wire.protocol import ErrorCode, Generate

POLICY = CanaryPolicy(window_s=60, min_requests=10, max_error_rate=0.1, max_ttft_ratio=2.0)
JUDGE_INTERVAL_S = 0.2
SPLIT = Alias("t", "bot", "prod", 1, {1: 50, 2: 50}, POLICY, change=9)


def histogram(*milliseconds: float) -> list[int]:
    counts = [0] * NUM_STEPS
    for each in milliseconds:
        counts[ttft_step(each / 1000)] += 1
    return counts


@given(st.lists(st.floats(0.3, 3_000_000), min_size=1, max_size=50))
def test_the_median_is_right_to_a_step(times: list[float]) -> None:
    step = 2**0.25
    exact = statistics.median_low(times), statistics.median_high(times)
    assert exact[0] / step * 0.999 <= median_ms(histogram(*times)) <= exact[1] * step * 1.001


@given(st.floats(0, 1e6))
def test_a_time_is_in_the_step_that_the_table_says(seconds: float) -> None:
    step = ttft_step(seconds)
    assert 0 <= step < NUM_STEPS
    if step < NUM_STEPS - 1:
        assert seconds * 1000 <= 0.25 * 2 ** ((step + 1) / 4) * 1.000001
    if step > 0:
        assert seconds * 1000 > 0.25 * 2 ** (step / 4) * 0.999999


def test_tallies_are_added_step_by_step() -> None:
    sum_ = Tally()
    for each in (
        Tally(1, 0, [0, 1]),
        Tally(1, 1, [1]),
        Tally(1, 0, [0, 0, 1]),
        Tally(1, 0, [0, 2]),
    ):
        sum_.add(each)
    assert sum_ == Tally(4, 1, [1, 3, 1])


@pytest.mark.parametrize(
    ("stable", "canary", "verdict"),
    [
        (Tally(100, 0), Tally(100, 0), None),
        (Tally(100, 0), Tally(100, 10), None),
        (Tally(100, 0), Tally(100, 11), "version 2 failed 11 of 100 requests (11.0%), version 1"),
        (Tally(100, 50), Tally(100, 55), None),
        (Tally(100, 100), Tally(100, 100), None),
        (Tally(9, 0), Tally(100, 100), None),
        (Tally(100, 0), Tally(9, 9), None),
        (Tally(10, 0), Tally(10, 10), "10 of 10 requests (100.0%), version 1 0 of 10"),
        (Tally(10, 0, histogram(*[100] * 10)), Tally(10, 0, histogram(*[190] * 10)), None),
        (Tally(10, 0, histogram(*[100] * 10)), Tally(10, 0, histogram(*[250] * 10)), "ms to the"),
        (Tally(10, 0, histogram(*[100] * 9)), Tally(10, 0, histogram(*[250] * 10)), None),
        (Tally(10, 0, histogram(*[250] * 10)), Tally(10, 0, histogram(*[100] * 10)), None),
        (Tally(20, 0), Tally(), None),
    ],
)
def test_judge(stable: Tally, canary: Tally, verdict: str | None) -> None:
    found = judge(SPLIT, {1: stable, 2: canary})
    assert (found is None) == (verdict is None)
    assert (verdict or "") in (found or "")


def test_judge_finds_the_worse_of_several() -> None:
    split = Alias("t", "bot", "prod", 5, {5: 80, 6: 10, 7: 10}, POLICY)
    fine, bad = Tally(50, 0), Tally(50, 25)
    assert judge(split, {5: fine, 6: fine, 7: fine}) is None
    assert (judge(split, {5: fine, 6: fine, 7: bad}) or "").startswith("version 7 failed")
    assert judge(Alias("t", "bot", "prod", 5, {5: 1, 6: 1}), {5: fine, 6: bad}) is None
    assert judge(split, {6: bad}) is None


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are written and judged ten times as often as in production."""
    monkeypatch.setattr("gateway.control.canary_judge.WRITE_INTERVAL_S", 0.1)
    monkeypatch.setattr("gateway.control.canary_judge.JUDGE_INTERVAL_S", JUDGE_INTERVAL_S)


async def make_canary(live: Live, policy: CanaryPolicy | None = POLICY) -> None:
    await live.make_ready("a", "b")
    async with live.database.transaction() as connection:
        weights = {1: 50, 2: 50}
        await aliases.set_canary(connection, live.tenant_id, "bot", "prod", weights, policy)


async def send(plane: GatewayPlane, num_requests: int, **fields: Any) -> list[int]:
    """The statuses of completions by as many users."""
    answers = await asyncio.gather(
        *(plane.complete(user=f"user-{i}", **fields) for i in range(num_requests))
    )
    return [each.status_code for each in answers]


async def outcomes(live: Live) -> dict[int, tuple[int, int, int]]:
    """Requests, errors and measured first tokens by version."""
    rows = await live.fetch(
        "SELECT version, sum(requests)::int, sum(errors)::int,"
        " sum((SELECT sum(n) FROM unnest(ttft) n))::int FROM version_outcomes GROUP BY version"
    )
    return {row[0]: (row[1], row[2], row[3] or 0) for row in rows}


async def history(live: Live) -> list[Any]:
    async with live.database.acquire() as connection:
        return await aliases.alias_history(connection, live.tenant_id, "bot", "prod")


async def is_rolled_back(live: Live) -> bool:
    return (await history(live))[0].reason == "auto_rollback"


def failing(request: Generate) -> Reply:
    is_canary = request.adapter is not None and request.adapter.digest[0] == "b"
    return Reply([65], failure=ErrorCode.INTERNAL) if is_canary else answer(request)


def slow(request: Generate) -> Reply:
    is_canary = request.adapter is not None and request.adapter.digest[0] == "b"
    return Reply([65, 66], idle_steps=1000) if is_canary else answer(request)


def steady(request: Generate) -> Reply:
    """Every first token comes equally late, so that a pause of the machine between two requests is
    no difference between versions."""
    return Reply([65, 66, 67], idle_steps=200)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_canary_goes_back(live: Live, often: None, stream: bool) -> None:
    live.worker.script = failing
    await make_canary(live)
    async with live.worker, live.gateway() as plane, live.gateway("gateway-2") as other:
        statuses = await send(plane, 40, stream=stream) + await send(other, 20, stream=stream)
        assert set(statuses) == ({200} if stream else {200, 500})
        await eventually(lambda: is_rolled_back(live))
        newest = (await history(live))[0]
        assert (newest.version, newest.canary, newest.changed_by) == (1, None, None)
        assert "version 2 failed" in newest.detail and "(100.0%), version 1 0 of" in newest.detail
        await eventually(lambda: _all_get(plane, "1"))
        assert len(await history(live)) == 3


async def _all_get(plane: GatewayPlane, version: str) -> bool:
    answers = await asyncio.gather(*(plane.complete(user=f"user-{i}") for i in range(10)))
    return {each.headers.get("loraplex-adapter-version") for each in answers} == {version}


async def test_a_slow_canary_goes_back(live: Live, often: None) -> None:
    live.worker.script = slow
    await make_canary(live)
    async with live.worker, live.gateway() as plane:
        for _ in range(3):
            assert set(await send(plane, 20)) == {200}
        await eventually(lambda: is_rolled_back(live), 60)
        assert "ms to the first token" in (await history(live))[0].detail


async def test_a_good_canary_stays_and_is_counted(live: Live, often: None) -> None:
    live.worker.script = steady
    await make_canary(live)
    async with live.worker, live.gateway() as plane, live.gateway("gateway-2") as other:
        for gateway in (plane, other):
            assert set(await send(gateway, 40)) == {200}
        # Neither the caller's mistakes nor requests by number are the canary's.
        await send(plane, 10, prompt=[9] * 1000)
        await send(plane, 10, model="bot@2")

        async def all_counted() -> bool:
            seen = await outcomes(live)
            return sum(each[0] for each in seen.values()) == 90

        await eventually(all_counted)
        seen = await outcomes(live)
        assert set(seen) == {1, 2}
        assert sum(errors for _, errors, _ in seen.values()) == 0
        assert sum(measured for _, _, measured in seen.values()) == 80
        await asyncio.sleep(3 * JUDGE_INTERVAL_S)
        assert not await is_rolled_back(live)


@pytest.mark.parametrize(
    ("window_s", "bucket_s"), [(30, 10), (300, 10), (3600, 120), (86400, 2880)]
)
async def test_a_window_has_few_buckets(live: Live, window_s: int, bucket_s: int) -> None:
    """Each gateway reads all of them again and again."""
    await make_canary(live, CanaryPolicy(window_s=window_s))
    async with live.database.acquire() as connection:
        (alias,) = await aliases.list_aliases(connection, live.tenant_id, "bot")
        outcome = {"change": alias.change, "version": 2, "requests": 1, "errors": 0, "ttft": []}
        before = time.time()
        await connection.execute(sql["outcomes_add"], "gateway-1", [outcome])
        bucket = (await connection.fetchval("SELECT bucket FROM version_outcomes")).timestamp()
    assert bucket % bucket_s == 0
    assert before - bucket_s < bucket <= time.time()


async def test_all_sets_are_judged_by_one_query(live: Live, dsn: str) -> None:
    """Each by its own outcomes in its own window; and each gateway asks every other second."""
    await live.make_ready("a", "b")
    weights, named = {1: 50, 2: 50}, [f"set-{i}" for i in range(20)]
    async with live.database.transaction() as connection:
        for i, name in enumerate(named):
            window_s = 60 if i % 2 else 600
            policy = CanaryPolicy(window_s=window_s, min_requests=10, max_error_rate=0.1)
            await aliases.set_alias(connection, live.tenant_id, "bot", name, 1)
            await aliases.set_canary(connection, live.tenant_id, "bot", name, weights, policy)
        made = await aliases.list_aliases(connection, live.tenant_id, "bot")
        outcomes = [
            {
                "change": alias.change,
                "version": version,
                "requests": 10,
                "errors": 10 if version == 2 and alias.alias in named[:4] else 0,
                "ttft": histogram(*[250 if version == 2 and alias.alias == "set-9" else 100] * 10),
            }
            for alias in made
            if alias.canary
            for version in weights
        ]
        await connection.execute(sql["outcomes_add"], "gateway-1", outcomes)
        # Of the sets that do worse, those that look back for a minute find nothing in it.
        await connection.execute(
            "UPDATE version_outcomes SET bucket = bucket - interval '5 minutes' WHERE errors > 0 OR"
            " change IN (SELECT change FROM version_outcomes WHERE errors > 0)"
        )
    asked: list[str] = []
    database = await Database.connect(dsn, sees=EVERYTHING, max_size=1)
    catalog = Catalog(PostgresSource(database, poll_interval_s=3600))
    loading = asyncio.create_task(catalog.run())
    await eventually(lambda: catalog.view is not None)
    async with database.acquire() as connection:
        noting: Any = connection
        noting.add_query_logger(lambda record: asked.append(record.query))
    judging = asyncio.create_task(CanaryJudge(database, "gateway-2", catalog, Outcomes()).run())

    async def have_gone_back() -> bool:
        rows = await live.fetch("SELECT alias FROM alias_history WHERE reason = 'auto_rollback'")
        return [row["alias"] for row in rows] == ["set-0", "set-2", "set-9"]

    await eventually(have_gone_back)
    assert sum("ttft" in query for query in asked) < 5
    for task in (judging, loading):
        task.cancel()
    await asyncio.gather(judging, loading, return_exceptions=True)
    await database.close()


async def test_what_was_before_the_last_move_does_not_count(live: Live, often: None) -> None:
    """The same versions, split anew: the canary begins with a clean sheet."""
    live.worker.script = failing
    await make_canary(live, policy=None)
    async with live.worker, live.gateway() as plane:
        await send(plane, 60)
        async with live.database.transaction() as connection:
            weights = {1: 51, 2: 49}
            await aliases.set_canary(connection, live.tenant_id, "bot", "prod", weights, POLICY)
        live.worker.script = answer
        await asyncio.sleep(5 * JUDGE_INTERVAL_S)
        assert not await is_rolled_back(live)


async def test_outcomes_wait_for_a_database_that_is_away(live: Live, often: None) -> None:
    await make_canary(live)
    async with live.worker, live.gateway() as plane:
        async with live.postgres_away():
            assert set(await send(plane, 20)) == {200}
            await asyncio.sleep(0.3)

        async def all_counted() -> bool:
            return sum(each[0] for each in (await outcomes(live)).values()) == 20

        await eventually(all_counted)
