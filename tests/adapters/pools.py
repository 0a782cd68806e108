"""A pool over a small arena, with the reference ops and loads that tests step by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from adapters.format.validator import AdapterFiles
from adapters.pool.device import DeviceTier
from adapters.pool.host import HostTier
from adapters.pool.image import ImageCache
from adapters.pool.loader import AdapterLoader, LoaderThreads
from adapters.pool.loads import Loads
from adapters.pool.lora import ImageLayout, pack
from adapters.pool.pool import AdapterPool
from adapters.pool.source import AdapterLease, AdapterTier, AdapterTurn, AdapterUnavailable
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from memory.accounts import NO_TENANT, Tenant
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from memory.reuse import ReuseByKey
from ops.base import PROJECTIONS, AdapterTables, FusedLinear, LoRABatch
from ops.commands import Command, PendingCommands
from ops.factor_layout import ROWS
from ops.reference import ReferenceOps
from tests.adapters.files import BASE, stage_adapter
from tests.memory.holder import page_keys
from tests.ops.packed_factor import read_factor
from workers.execution.batch import ModelBuffers
from workers.layers.segments import build_segments

T = TypeVar("T")


class Status(NamedTuple):
    """One adapter, as a worker's status shows it."""

    digest: str
    tier: AdapterTier
    num_bytes: int
    leases: int
    pinned: bool
    fault: AdapterUnavailable | None


class SteppedExecutor(Executor):
    """Runs what is submitted when `step` is called: the oldest, or another, as several threads
    would."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def step(self, index: int = 0) -> None:
        if self.waiting:
            future, call = self.waiting.pop(index)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    def drain(self) -> None:
        while self.waiting:
            self.step()


class Uncharged:
    charge = (0.0, 0.0)


def turn_of(tenant: Tenant = NO_TENANT, patience_s: float = 0.0) -> AdapterTurn:
    """Turn of a sequence whose tenant was charged nothing."""
    return AdapterTurn(tenant, Uncharged(), patience_s)


def evict_one(device: DeviceTier) -> bool:
    """Evicts one idle adapter. Returns False if there is none."""
    victim = next(iter(device.idle(with_awaited=False)), None)
    if victim is not None:
        device.evict(victim)
    return victim is not None


class AppliedCommands(PendingCommands):
    """Those of adapter slots change the buffers when they are taken, as a runner would."""

    def __init__(self, buffers: ModelBuffers) -> None:
        super().__init__()
        self.buffers = buffers

    def take(self) -> list[Command]:
        self.apply()
        return super().take()

    def apply(self) -> None:
        for command in self.slots.values():
            self.buffers.apply(command)


class PoolSetup:
    """Store, arena, clock and pool together. Adapter `i` has a rank of ranks[i]. adapter_units:
    floor and ceiling. extent_units: of each extent, in units too. has_threads: loads run on the
    pool's own, not on `executor`."""

    def __init__(
        self,
        folder: Path,
        ranks: list[int],
        *,
        num_units: int = 4,
        adapter_units: tuple[int, int] | None = None,
        extent_units: int = 1,
        num_slots: int = 8,
        host_bytes: int = 1 << 24,
        has_threads: bool = False,
        cache_bytes: int = 1 << 30,
    ) -> None:
        self.store = LocalStore(folder / "store")
        self.refs = [self.add(rank, seed) for seed, rank in enumerate(ranks)]
        self.ops = ReferenceOps()
        floor, ceiling = adapter_units or (0, num_units)
        self.now = 0.0
        self.map = Arena(
            num_units * UNIT_BYTES,
            extent_units * UNIT_BYTES,
            floor * UNIT_BYTES,
            ceiling * UNIT_BYTES,
            clock=lambda: self.now,
        )
        self.arena = torch.full((num_units * UNIT_BYTES,), 255, dtype=torch.uint8)
        self.placements = AdapterMemory(self.map)
        self.broker = MemoryBroker(self.map, self.placements)
        self.kv = KVCache(
            self.map, "kv", UNIT_BYTES // 4, source=self.broker, clock=lambda: self.now
        )
        self.executor = SteppedExecutor()
        self.host = HostTier(host_bytes, self.broker.bytes_held.accounts, clock=lambda: self.now)
        self.requests = ReuseByKey(lambda: self.now)
        self.cache = ImageCache(folder / "cache", cache_bytes, self.requests.expected)
        self.num_slots = num_slots
        self.pins: set[int] = set()
        self.loader = AdapterLoader(self.store, BASE, torch.float32, self.ops, self.cache)
        self.pool = self.make_pool(has_threads=has_threads)

    def make_pool(self, *, has_threads: bool = False) -> AdapterPool:
        """Of another base model of the same worker, where one is there."""
        size = self.num_slots, BASE.num_layers + 1, len(PROJECTIONS)
        tables = AdapterTables.empty(size, self.ops.device)
        buffers = ModelBuffers(self.arena, torch.empty(0), tables)
        device = DeviceTier(
            *(self.arena, self.placements, self.broker),
            ops=self.ops,
            commands=AppliedCommands(buffers),
            copies=buffers.copies,
            table_shape=(BASE.num_layers + 1, len(BASE.projections)),
            num_slots=self.num_slots,
            clock=lambda: self.now,
        )
        self.broker.add_holder(device)
        loads = Loads(
            *(self.loader, self.host, device),
            lock=self.broker.lock,
            fetcher=LoaderThreads("fetcher") if has_threads else self.executor,
            copier=LoaderThreads("copier") if has_threads else self.executor,
            disk_bytes=self.cache.max_bytes,
            clock=lambda: self.now,
        )
        return AdapterPool(loads, requests=self.requests, clock=lambda: self.now)

    def add(self, rank: int, seed: int) -> AdapterRef:
        staged = self.store.stage()
        digest = stage_adapter(staged, rank=rank, seed=seed)
        self.store.put("adapters", digest, staged)
        return AdapterRef(digest)

    def cache_prefix(self, word: int, num_pages: int) -> bool:
        """One sequence of so many pages has run and left them in the prefix cache. False: no
        room."""
        tokens = [word] * (num_pages * PAGE_TOKENS)
        keys = page_keys(PageHasher(model="m", domain="d"), tokens)
        table = BlockTable(self.kv)
        table.match_prefix(keys[: (len(tokens) - 1) // PAGE_TOKENS])
        has_room = table.grow(len(tokens))
        if has_room:
            table.commit(keys)
        table.free()
        return has_room

    def pin(self, *indices: int) -> None:
        self.pins |= {*indices}
        self.pool.keep(self.refs[index] for index in sorted(self.pins))

    def unpin(self, *indices: int) -> None:
        self.pins -= {*indices}
        self.pin()

    def settle(self) -> None:
        """Lets everything that is loading finish, and the pool see it."""
        for _ in range(4):
            self.executor.drain()
            self.pool.begin_step(())

    def lease(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> AdapterLease | None:
        """A lease, if the adapter is on the device."""
        turn = None if tenant == NO_TENANT else turn_of(tenant)
        acquired = self.pool.acquire(ref, turn)
        return acquired if isinstance(acquired, AdapterLease) else None

    def load(self, index: int) -> Any:
        """A lease on the adapter, for a request; it must become resident."""
        self.pool.prefetch(self.refs[index])
        for _ in range(3):
            lease = self.lease(self.refs[index])
            if lease is not None:
                return lease
            self.settle_step()
        raise AssertionError(f"adapter {index} does not come")

    def settle_step(self) -> None:
        self.executor.drain()
        self.pool.begin_step(())
        self.executor.drain()
        self.pool.begin_step(())

    def tier(self, index: int) -> str | None:
        digest = self.refs[index].digest
        tiers = {status.digest: status.tier for status in self.statuses()}
        if digest in tiers:
            return tiers[digest]
        return "disk" if self.cache.has(self.loader.layout.version, digest) else None

    def statuses(self, pool: AdapterPool | None = None) -> list[Status]:
        """The adapters that a pool knows, then others whose last load failed."""
        pool = pool or self.pool
        faults = pool.loads.failures.faults
        near = [
            Status(e.digest, e.tier, e.num_bytes, e.leases, e.is_pinned, faults.get(e.digest))
            for e in pool.entries.values()
        ]
        return near + [
            Status(digest, pool.loads.far_tier(digest), 0, 0, False, fault)
            for digest, fault in faults.items()
            if digest not in pool.entries
        ]

    def on_device(self) -> set[int]:
        return {i for i in range(len(self.refs)) if self.tier(i) == "device"}

    @property
    def tables(self) -> AdapterTables:
        """As the next step of the pool's model sees them."""
        commands = self.pool.device.commands
        assert isinstance(commands, AppliedCommands)
        commands.apply()
        return commands.buffers.tables

    def check(self, held: Sequence[int] = ()) -> None:
        self.pool.check_integrity()
        self._check_tables()
        self.kv.check_integrity(held)
        self.placements.check_integrity()
        self.map.check_integrity()

    def _check_tables(self) -> None:
        """Exactly the slots of loaded adapters have ranks, and factors inside of the adapters'
        pieces."""
        tables, entries = self.tables, self.pool.entries.values()
        serving = {e.slot: e.placement for e in entries if e.slot is not None and e.is_ready}
        assert {*tables.rank.flatten(1).any(1).nonzero().flatten().tolist()} == serving.keys()
        assert tables.replaced.keys() <= serving.keys()
        for slot, placement in serving.items():
            assert placement is not None
            for table in (tables.a_offset, tables.b_offset):
                offsets = table[slot][tables.rank[slot] > 0]
                inside = torch.zeros(len(offsets), dtype=torch.bool)
                for offset, start, stop in placement.pieces:
                    inside |= (offsets >= offset) & (offsets < offset + stop - start)
                assert inside.all()

    def delta(self, slot: int, layer: int, projection: int) -> torch.Tensor:
        """(x A^T) B of a slot for x = identity, by the reference op: [in, out]."""
        k, n = BASE.projection_shape(0, PROJECTIONS[projection])
        start, slots = build_segments([(slot, k)])
        y = torch.zeros(k, n)
        batch = LoRABatch(
            arena=self.arena,
            dtype=torch.float32,
            tables=self.tables,
            segment_start=torch.from_numpy(start),
            segment_slot=torch.from_numpy(slots),
            max_rank=256,
        )
        self.ops.add_lora(y, torch.eye(k), FusedLinear((projection,), (n,), k), layer, batch)
        return y

    def serves(self, slot: int, index: int) -> bool:
        """Whether the slot computes exactly what the files of adapter `index` say."""
        files = AdapterFiles.in_folder(self.store.adapter_folder(self.refs[index].digest))
        tables, image = pack(files, BASE, ImageLayout(BASE.num_layers, torch.float32, ROWS))
        at = (1, 6)
        rank = int(tables.rank[at])
        k, n = BASE.projection_shape(0, PROJECTIONS[at[1]])

        def matrix(offset: int, rows: int, depth: int) -> torch.Tensor:
            return read_factor(image[offset:].view(torch.float32), rows, depth, ROWS)

        a = matrix(int(tables.a_offset[at]), rank, k)
        b = matrix(int(tables.b_offset[at]), n, rank)
        return torch.allclose(self.delta(slot, *at), a.T @ b.T)
