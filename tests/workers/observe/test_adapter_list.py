"""The list of adapters in a worker's status: whole while it is short, bounded when it is not, and
with totals that are right either way."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from tests.adapters.pools import PoolSetup
from workers.observe import adapter_list
from workers.observe.adapter_list import MAX_ADAPTERS, MAX_TEXT, list_adapters
from workers.wire.frames import MAX_FRAME_BYTES
from workers.wire.status import AdapterStatus, WorkerStatus

TIERS = ("device", "host", "loading")


def test_totals_are_those_of_the_whole_list_at_every_moment(tmp_path: Path) -> None:
    """While adapters come, are leased, evicted, pinned and fail, of two models on one host."""
    rng = random.Random(7)
    setup = PoolSetup(tmp_path, [2, 2, 4, 4, 8, 8], num_units=3, host_bytes=60_000)
    setup.add(4, 99)
    pools = [setup.pool, setup.make_pool()]
    for _ in range(300):
        pool = rng.choice(pools)
        match rng.randrange(4):
            case 0:
                pool.prefetch(rng.choice(setup.refs))
            case 1:
                pool.load(rng.choice(setup.refs))
            case 2:
                setup.executor.step()
            case _:
                pool.begin_step(())
        found = list_adapters(pools, setup.host)
        assert found.num_unlisted == 0
        entries = [entry for each in pools for entry in each.entries.values()]
        assert sorted(a.digest for a in found.adapters) == sorted(e.digest for e in entries)
        for tier in TIERS:
            sizes = [a.num_bytes for a in found.adapters if a.tier == tier]
            assert found.counts.get(tier, 0) == len(sizes), tier
            assert found.num_bytes.get(tier, 0) == sum(sizes), tier
    setup.executor.drain()


def test_a_long_list_keeps_what_is_near_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_list, "MAX_ADAPTERS", 5)
    monkeypatch.setattr(adapter_list, "MAX_FAILED", 2)
    setup = PoolSetup(tmp_path, [2] * 12, num_units=8)
    for index in (3, 5):
        setup.load(index)
    for index in range(12):
        setup.pool.prefetch(setup.refs[index])
    setup.settle()
    for digit in "abcdef":
        setup.pool.acquire(setup.refs[0].__class__(digit * 64))
    setup.settle()
    setup.now += 60.0
    setup.pool.begin_step(())
    found = list_adapters([setup.pool], setup.host)
    assert [adapter.tier for adapter in found.adapters if not adapter.error][:2] == ["device"] * 2
    assert [adapter.error for adapter in found.adapters].count("adapter.store.missing") == 2
    assert len(found.adapters) == 5
    assert len(found.adapters) + found.num_unlisted == 12 + 6
    assert found.counts["device"] == 2 and found.counts["host"] == 10


def test_the_largest_list_fits_into_a_frame_many_times() -> None:
    text = "\N{BLACK CIRCLE}" * MAX_TEXT
    adapter = AdapterStatus("a" * 64, "loading", 1 << 62, 1 << 62, True, "a" * 64, text, text)
    adapters = [adapter] * MAX_ADAPTERS
    status = WorkerStatus("w", False, [], adapters, 0, "", {}, 0, 0.0)
    assert len(msgspec.msgpack.encode(status)) < MAX_FRAME_BYTES // 3
