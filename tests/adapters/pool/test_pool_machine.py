"""Whatever is asked in whatever order: slots and bytes add up, a lease serves its adapter."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adapters.pool.source import AdapterLease, AdapterUnavailable
from adapters.reference import AdapterRef
from memory.block_table import BlockTable
from tests.adapters.pools import PoolSetup, evict_one
from tests.memory.holder import num_placements

RANKS = [1, 4, 5, 12, 16, 30]
INDICES = st.integers(0, len(RANKS) - 1)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.tables: list[BlockTable] = []
        self.setup = PoolSetup(
            self.folder,
            RANKS,
            num_units=6,
            num_slots=3,
            host_bytes=300_000,
        )
        self.other = self.setup.make_pool()
        """Of another base model."""
        self.leases: list[tuple[int, AdapterLease]] = []

    def teardown(self) -> None:
        for _, lease in self.leases:
            lease.release()
        for table in self.tables:
            table.free()
        self.setup.pool.close()
        self.other.close()
        assert num_placements(self.setup.placements) == 0
        shutil.rmtree(self.folder)

    @rule(index=INDICES)
    def prefetch(self, index: int) -> None:
        self.setup.pool.prefetch(self.setup.refs[index])

    @rule(index=INDICES)
    def other_prefetch(self, index: int) -> None:
        self.other.prefetch(self.setup.refs[index])

    @rule(index=INDICES)
    def other_acquire(self, index: int) -> None:
        lease = self.other.acquire(self.setup.refs[index])
        if isinstance(lease, AdapterLease):
            lease.release()

    @rule()
    def other_begins_step(self) -> None:
        self.other.begin_step(())

    @rule(index=INDICES)
    def cancel(self, index: int) -> None:
        self.setup.pool.cancel(self.setup.refs[index])

    @rule(index=INDICES)
    def acquire(self, index: int) -> None:
        lease = self.setup.lease(self.setup.refs[index])
        if lease is not None:
            assert self.setup.serves(lease.slot, index)
            assert lease.max_rank == RANKS[index]
            self.leases.append((index, lease))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            index, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            assert self.setup.serves(lease.slot, index)
            lease.release()

    @rule()
    def acquire_what_is_missing(self) -> None:
        try:
            self.setup.lease(AdapterRef("f" * 64))
        except AdapterUnavailable as error:
            assert error.code == "adapter.store.missing"

    @rule(index=INDICES)
    def pin(self, index: int) -> None:
        self.setup.pin(index)

    @rule(index=INDICES)
    def unpin(self, index: int) -> None:
        self.setup.unpin(index)

    @rule()
    def evict(self) -> None:
        evict_one(self.setup.pool.device)

    @rule(index=INDICES)
    def evict_all_idle(self, index: int) -> None:
        if self.setup.pool.evict_all_idle(self.setup.refs[index]):
            on_device = [one for one in self.setup.statuses() if one.tier == "device"]
            assert all(one.leases or one.pinned for one in on_device)

    @rule(word=st.integers(0, 3), num_pages=st.integers(1, 9))
    def prefix(self, word: int, num_pages: int) -> None:
        self.setup.cache_prefix(word, num_pages)

    @rule(num_tokens=st.integers(1, 200))
    def sequence_runs(self, num_tokens: int) -> None:
        table = BlockTable(self.setup.kv)
        if table.grow(num_tokens):
            self.tables.append(table)

    @rule()
    def sequence_ends(self) -> None:
        if self.tables:
            self.tables.pop().free()

    @rule(data=st.data())
    def loader_steps(self, data: st.DataObject) -> None:
        """Fetches and copies, in whatever order."""
        if num_waiting := len(self.setup.executor.waiting):
            self.setup.executor.step(data.draw(st.integers(0, num_waiting - 1)))

    @rule()
    def poll(self) -> None:
        self.setup.pool.begin_step(())

    @rule(seconds=st.sampled_from([0.001, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.setup.now += seconds

    @invariant()
    def adds_up(self) -> None:
        self.setup.check(held=[page for table in self.tables for page in table.held_pages])
        self.other.check_integrity()
        leased = {index for index, _ in self.leases}
        assert leased <= self.setup.on_device()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
