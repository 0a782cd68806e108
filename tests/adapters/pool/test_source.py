"""What every source of adapters does, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.pool.source import (
    AdapterLease,
    AdapterSource,
    AdapterUnavailable,
    FixedAdapters,
    Loading,
    NoRoom,
)
from adapters.reference import AdapterRef
from tests.adapters.pools import PoolSetup
from tests.workers.simulation import StubPool

NUM_SLOTS = 2
RANK = 4
"""Of an adapter whose image takes one unit of memory."""


class Source:
    """A source with room for two adapters, and adapters to request."""

    def __init__(
        self, adapters: AdapterSource, refs: list[AdapterRef], settle: Callable[[], None]
    ) -> None:
        self.adapters = adapters
        self.refs = refs
        self.settle = settle

    def lease(self, ref: AdapterRef) -> AdapterLease:
        """Asks in each step, as a waiting sequence does."""
        for _ in range(8):
            self.adapters.begin_step(())
            match self.adapters.acquire(ref):
                case AdapterLease() as lease:
                    return lease
                case Loading() | NoRoom():
                    self.settle()
        raise AssertionError("no lease")


def pooled(folder: Path) -> Source:
    setup = PoolSetup(folder, [RANK] * 3, num_units=NUM_SLOTS)
    return Source(setup.pool, setup.refs, setup.settle)


def fixed(_: Path) -> Source:
    refs = [AdapterRef(name) for name in "ab"]
    return Source(FixedAdapters({ref.digest: 8 for ref in refs}), refs, lambda: None)


def stubbed(_: Path) -> Source:
    return Source(
        StubPool(NUM_SLOTS, delay_steps=1), [AdapterRef(name) for name in "abc"], lambda: None
    )


@pytest.fixture(params=[pooled, fixed, stubbed])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return request.param(tmp_path)


def test_a_requested_adapter_is_leased_in_the_end(source: Source) -> None:
    ref = source.refs[0]
    source.adapters.prefetch(ref)
    assert source.lease(ref).max_rank > 0


def test_leases_of_one_adapter_share_a_slot_and_others_have_their_own(source: Source) -> None:
    first, again, other = (source.lease(source.refs[index]) for index in (0, 0, 1))
    assert first.slot == again.slot != other.slot


def test_it_is_leased_until_the_last_lease_is_released(source: Source) -> None:
    first, second = source.lease(source.refs[0]), source.lease(source.refs[0])
    first.release()
    first.release()
    assert source.adapters.is_busy
    second.release()
    assert not source.adapters.is_busy


def test_leased_adapters_stay_whatever_else_is_requested(source: Source) -> None:
    leased = [source.lease(ref) for ref in source.refs[:2]]
    for ref in source.refs[2:]:
        for _ in range(4):
            source.adapters.begin_step(())
            assert not isinstance(source.adapters.acquire(ref), AdapterLease)
            source.adapters.evict_all_idle(ref)
            source.settle()
    assert [source.lease(ref).slot for ref in source.refs[:2]] == [each.slot for each in leased]


def test_a_cancelled_load_may_be_requested_again(source: Source) -> None:
    ref = source.refs[0]
    source.adapters.load(ref)
    source.adapters.cancel(ref)
    source.settle()
    assert isinstance(source.lease(ref), AdapterLease)


def test_an_unknown_adapter_is_refused_by_name(tmp_path: Path) -> None:
    for source in (pooled(tmp_path), fixed(tmp_path)):
        with pytest.raises(AdapterUnavailable) as caught:
            source.lease(AdapterRef("f" * 64))
        assert caught.value.code == "adapter.store.missing"
