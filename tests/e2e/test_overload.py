"""More than the whole product can do: what is done all the same, what is refused and how, and what
a tenant who asks for too much costs the others. `python -m benchmarks.fairness` prints the
figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles import write_adapter
from tests.e2e.shares import NUM_LAYERS, capacity, heavy_tenant, load, obedient, ordinary
from tests.e2e.tiny import NAME, Tiny
from tests.scale import IS_FULL, scaled
from tests.stack import Stack, running

SECONDS = scaled(4, 30)
NUM_ADAPTERS = scaled(6, 50)
LENIENCE = 1.0 if IS_FULL else 10.0
"""Of deadlines: the suite shares its machine."""
SHARED_S = 0.0 if IS_FULL else 0.1
"""What such a machine takes of anybody's time; who was alone may have been spared."""

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Few rows, so that the device is full before the gateway is, and a short queue."""
    tiny = Tiny(tmp_path_factory.mktemp("tiny"))
    settings = {"max_num_seqs": 2, "max_queue_wait": 0.05, "memory": 64 << 20}
    with running(tiny.stack(**settings)) as stack:
        yield stack


@pytest.mark.timeout(900)
def test_five_times_too_much_costs_no_goodput_and_is_refused_at_once(stack: Stack) -> None:
    key = stack.create_tenant("acme")

    async def measure() -> None:
        per_s = await capacity(stack.url, key, SECONDS)
        times = (0.5, 0.8, 1.0, 2.0, 5.0) if IS_FULL else (0.8, 5.0)
        loads = {t: await load(stack.url, key, t, per_s, SECONDS) for t in times}
        peak = max(each.served_per_s for each in loads.values())
        worst = loads[5.0]
        assert worst.num_refused > 0
        assert worst.served_per_s >= (0.9 if IS_FULL else 0.5) * peak, loads
        before = max(loads[0.8].p99_ttft_s, SHARED_S)
        assert worst.p99_ttft_s <= 2.0 * LENIENCE * before, loads
        for each in loads.values():
            assert each.all_whole and each.all_told_when, each
            refusal_s = each.p99_refusal_s if IS_FULL else each.p50_refusal_s
            assert refusal_s <= 0.020 * LENIENCE, each

    asyncio.run(measure())


@pytest.mark.timeout(900)
def test_who_comes_again_when_told_to_is_served(stack: Stack) -> None:
    key = stack.create_tenant("globex")
    # Nobody is refused of a queue that was not seen to go down yet.
    asyncio.run(capacity(stack.url, key, 2.0))
    clients = asyncio.run(obedient(stack.url, key, scaled(60, 400)))
    assert all(attempts[-1].status == 200 and attempts[-1].is_whole for attempts in clients)
    assert any(len(attempts) > 1 for attempts in clients), "nobody was refused"


@pytest.mark.timeout(900)
def test_ordinary_tenants_beside_a_heavy_one(tmp_path: Path) -> None:
    """Ten times the load of each of the others, an adapter of its own for almost every request, and
    giant prompts."""
    tiny = Tiny(tmp_path, num_layers=scaled(2, NUM_LAYERS))
    settings = {"max_num_seqs": 32, "memory": 48 << 20, "max_loaded_adapters": 8}
    with running(tiny.stack(**settings)) as stack:
        keys = {who: stack.create_tenant(who) for who in ("one", "two", "three")}
        heavy = stack.create_tenant("heavy")
        for number in range(NUM_ADAPTERS):
            folder = tmp_path / f"a{number}"
            write_adapter(tiny.shape, folder, rank=8, seed=number)
            stack.push(folder, f"a{number}", "heavy", model=NAME)

        async def measure() -> None:
            per_s = await capacity(stack.url, keys["one"], SECONDS) / 8
            alone = await ordinary(stack.url, keys, per_s, SECONDS)
            models = [f"a{number}" for number in range(NUM_ADAPTERS)]
            beside = await ordinary(stack.url, keys, per_s, SECONDS, heavy_tenant(heavy, models))
            for each in beside:
                assert each.num_served >= 0.95 * each.num_asked, beside
            worst, before = (max(each.p99_ttft_s for each in found) for found in (beside, alone))
            assert worst <= 1.5 * LENIENCE * max(before, SHARED_S), (alone, beside)

        asyncio.run(measure())
