"""More than the whole product can do: what is done all the same, what is refused and how, and what
a tenant who asks for too much costs the others. `python -m benchmarks.fairness` prints the
figures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.shares import (
    FEW_ROWS,
    HEAVY,
    NUM_ROWS,
    ORDINARY,
    SHORT_QUEUE,
    at_once,
    heavy_tenant,
    load,
    measure_capacity,
    obedient,
    ordinary,
    p99_ttft,
    paced,
)
from tests.scale import IS_FULL, scaled

SECONDS = scaled(2, 30)
NUM_ADAPTERS = scaled(6, 50)
NUM_AT_ONCE = 12 * FEW_ROWS

pytestmark = [pytest.mark.full, pytest.mark.soak]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def short_queue(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str]]:
    """A URL where nobody waits long, and the key of one who asks."""
    async with paced(tmp_path_factory.mktemp("short"), **SHORT_QUEUE) as (cluster, url):
        yield url, cluster.keys[ORDINARY[0]]


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_too_many_at_once_are_served_whole_or_told_when(
    short_queue: tuple[str, str],
) -> None:
    url, key = short_queue
    await measure_capacity(url, key, FEW_ROWS, 0.0)
    burst = await at_once(url, key, NUM_AT_ONCE)
    assert 0 < burst.num_refused < NUM_AT_ONCE
    assert burst.all_whole and burst.all_told_when, burst


@pytest.mark.skipif(not IS_FULL, reason="measures times: make soak")
@pytest.mark.timeout(900)
@pytest.mark.asyncio(loop_scope="module")
async def test_five_times_too_much_costs_no_goodput_and_is_refused_at_once(
    short_queue: tuple[str, str],
) -> None:
    url, key = short_queue
    per_s = await measure_capacity(url, key, FEW_ROWS, SECONDS)
    loads = {t: await load(url, key, t, per_s, SECONDS) for t in (0.5, 0.8, 1.0, 2.0, 5.0)}
    peak = max(each.served_per_s for each in loads.values())
    worst = loads[5.0]
    assert worst.num_refused > 0
    assert worst.served_per_s >= 0.9 * peak, loads
    assert worst.p99_ttft_s <= 2.0 * loads[0.8].p99_ttft_s, loads
    for each in loads.values():
        assert each.all_whole and each.all_told_when, each
        assert each.p99_refusal_s <= 0.020, each


@pytest.mark.timeout(900)
@pytest.mark.asyncio(loop_scope="module")
async def test_who_comes_again_when_told_to_is_served(short_queue: tuple[str, str]) -> None:
    url, key = short_queue
    # Nobody is refused of a queue that was not seen to go down yet.
    await measure_capacity(url, key, FEW_ROWS, 0.0)
    clients = await obedient(url, key, scaled(40, 400))
    assert all(attempts[-1].status == 200 and attempts[-1].is_whole for attempts in clients)
    assert any(len(attempts) > 1 for attempts in clients), "nobody was refused"


@pytest.mark.timeout(900)
async def test_ordinary_tenants_beside_a_heavy_one(tmp_path: Path) -> None:
    """Ten times the load of each of the others, an adapter of its own for almost every request, and
    giant prompts."""
    room = {"max_loaded_adapters": 8}
    async with paced(tmp_path, num_adapters=NUM_ADAPTERS, **room) as (cluster, url):
        keys = cluster.keys
        per_s = await measure_capacity(url, keys[ORDINARY[0]], NUM_ROWS, SECONDS) / 8
        heavy = heavy_tenant(keys[HEAVY], list(cluster.setup.digests))
        alone = await ordinary(url, keys, per_s, 2 * SECONDS, None) if IS_FULL else []
        *beside, greedy = await ordinary(url, keys, per_s, 2 * SECONDS, heavy)
    assert greedy.statuses <= {200, 503}
    for each in beside:
        assert each.num_served >= 0.95 * each.num_asked, each
    if IS_FULL:
        after_s, before_s = p99_ttft(beside), p99_ttft(alone)
        print(f"\np99 of a first token {1e3 * after_s:.1f} ms, alone {1e3 * before_s:.1f}")
        assert after_s <= 1.5 * before_s
