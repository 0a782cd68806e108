"""Which adapters are on the device, which on the host, and who may use them.

    store  --fetch-->  host (packed image)  --copy-->  device (a run, a slot of the tables)

The engine thread owns everything here. The loader thread is handed a digest, or an image and a run
that nobody reads yet; what it has done waits in a queue until `poll` applies it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from adapters.errors import AdapterUnavailable
from adapters.image import AdapterImage
from adapters.loader import AdapterLoader
from adapters.manifest import PROJECTIONS, BaseModelShape
from adapters.residency import AdapterLease, AdapterResidency, Entry, Tier
from adapters.store import Store
from memory.errors import require
from memory.runs import AdapterRuns, Run
from ops.base import AdapterTables, Ops

MAX_FAULTS = 256
"""Adapters whose last failure is remembered; they may be long forgotten otherwise."""


class AdapterRef(Protocol):
    """An immutable adapter version."""

    @property
    def digest(self) -> str: ...

    @property
    def checksum(self) -> str:
        """Of the packed image, as proved; empty if not known."""
        ...


class AdapterPool:
    """Leases on adapters of one base model over disk, host and device, each bounded in bytes.

    arena: uint8 [arena bytes], which `runs` cuts up. reclaim: takes one extent from the KV cache,
    False if it cannot. executor: a thread of its own unless given. Engine thread only.
    """

    def __init__(
        self,
        arena: Tensor,
        runs: AdapterRuns,
        *,
        store: Store,
        ops: Ops,
        shape: BaseModelShape,
        dtype: torch.dtype,
        num_slots: int,
        host_bytes: int,
        cache_dir: Path,
        clock: Callable[[], float],
        reclaim: Callable[[], bool],
        cache_bytes: int = 16 << 30,
        retry_s: float = 5.0,
        executor: Executor | None = None,
    ) -> None:
        self._arena = arena
        self._runs = runs
        self._loader = AdapterLoader(store, shape, dtype, ops.b_rank_major, cache_dir, cache_bytes)
        self._host_bytes = host_bytes
        self._clock = clock
        self._reclaim = reclaim
        self._retry_s = retry_s
        self.num_evictions = 0
        self._is_own_executor = executor is None
        self._executor = executor or ThreadPoolExecutor(
            1, thread_name_prefix="adapter-loader", initializer=_use_one_thread
        )
        self._entries: dict[str, Entry] = {}
        self._pinned: set[Entry] = set()
        self._faults: OrderedDict[str, AdapterUnavailable] = OrderedDict()
        self._free_slots = list(reversed(range(num_slots)))
        self._done: SimpleQueue[tuple[Entry, Future[AdapterImage]]] = SimpleQueue()
        self._num_polls = 0
        size = (num_slots, shape.num_layers, len(PROJECTIONS))
        self.tables = AdapterTables(
            a_offset=torch.zeros(size, dtype=torch.int64, device=ops.device),
            b_offset=torch.zeros(size, dtype=torch.int64, device=ops.device),
            rank=torch.zeros(size, dtype=torch.int32, device=ops.device),
        )

    @property
    def layout(self) -> str:
        """Names the layout of its packed images."""
        return self._loader.layout.version

    def prefetch(self, ref: AdapterRef) -> None:
        """Starts to bring the adapter to the host, where it then waits for an `acquire`."""
        entry = self._entry(ref)
        entry.note_use(self._clock())
        if entry.image is None and entry.slot is None and self._failure(entry) is None:
            self._fetch(entry)

    def cancel(self, ref: AdapterRef) -> None:
        """One who wanted the adapter has left: a load that has not begun is dropped.

        Whoever else wants it asks again anyway.
        """
        entry = self._entries.get(ref.digest)
        if entry is None or entry in self._pinned:
            return
        entry.asked_at_poll = -2
        if entry.loading is not None and entry.loading.cancel():
            entry.loading = None
            self._free_device(entry)
            self._trim_host()
            self._forget(entry)

    def acquire(self, ref: AdapterRef) -> AdapterLease | None:
        """A lease, or None: not on the device yet, ask again in the next step.

        Raises AdapterUnavailable when it could not be loaded; after a while a call tries again.
        """
        entry = self._entry(ref)
        if entry.slot is not None and entry.is_ready and not entry.is_wrong:
            entry.asked_at_poll = -2
            entry.leases += 1
            entry.note_use(self._clock())
            return AdapterLease(entry.slot, entry.max_rank, entry.checksum, entry)
        failure = self._failure(entry)
        if failure is not None:
            raise AdapterUnavailable(failure.code, str(failure))
        entry.asked_at_poll = self._num_polls
        self._advance(entry)
        return None

    def pin(self, ref: AdapterRef) -> None:
        """Brings the adapter to the device as soon as it fits and keeps it there."""
        entry = self._entry(ref)
        self._pinned.add(entry)
        self._advance(entry)

    def unpin(self, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry is not None:
            self._pinned.discard(entry)
            self._forget(entry)

    def poll(self) -> None:
        """Applies finished loads. Once a step, between steps."""
        self._num_polls += 1
        while True:
            try:
                entry, future = self._done.get_nowait()
            except Empty:
                break
            if entry.loading is future:
                entry.loading = None
                self._finish(entry, future)
        for entry in self._pinned:
            self._advance(entry)

    def evict_idle(self) -> bool:
        """Takes the idle adapter of least value per byte off the device. False if none is idle."""
        now = self._clock()
        idle = [entry for entry in self._entries.values() if self._is_idle(entry)]
        if not idle:
            return False
        self.num_evictions += 1
        victim = min(idle, key=lambda e: (e.value_per_byte(now), e.used_at, e.digest))
        self._free_device(victim)
        self._forget(victim)
        return True

    def status(self) -> list[AdapterResidency]:
        """Every adapter of the base model on this worker, those that are only on disk or known for
        a failure last."""
        fault = self._faults.get
        known = [
            AdapterResidency(
                e.digest, e.tier, e.num_bytes, e.leases, e in self._pinned, fault(e.digest)
            )
            for e in self._entries.values()
        ]
        far: dict[str, Tier] = dict.fromkeys(self._faults, "store")
        far |= dict.fromkeys(self._loader.cache.digests(), "disk")
        return known + [
            AdapterResidency(digest, tier, 0, 0, False, fault(digest))
            for digest, tier in far.items()
            if digest not in self._entries
        ]

    def close(self) -> None:
        """Waits for the load in progress, gives the device memory back. No lease may be held."""
        for entry in self._entries.values():
            if entry.loading is not None and not entry.loading.cancel():
                wait([entry.loading])
            self._free_device(entry)
        self._entries.clear()
        self._pinned.clear()
        if self._is_own_executor:
            self._executor.shutdown()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, runs, tables, leases and bytes agree."""
        entries = list(self._entries.values())
        slots = [e.slot for e in entries if e.slot is not None] + self._free_slots
        require(sorted(slots) == list(range(len(self.tables.rank))), f"slots {sorted(slots)}")
        host_bytes = sum(e.image.num_bytes for e in entries if e.image and e.loading is None)
        require(host_bytes <= self._host_bytes, f"{host_bytes} host bytes")
        for entry in entries:
            name = entry.digest[:12]
            require((entry.run is None) == (entry.slot is None), f"{name}: run without slot")
            require(entry.leases >= 0, f"{name}: {entry.leases} leases")
            require(entry.leases == 0 or entry.is_ready, f"{name}: leased, not on the device")
            self._check_tables(entry)
        for slot in self._free_slots:
            require(not self.tables.rank[slot].any(), f"free slot {slot} has ranks")

    def _check_tables(self, entry: Entry) -> None:
        if entry.slot is None or entry.run is None:
            return
        rank = self.tables.rank[entry.slot]
        require(bool(rank.any()) == entry.is_ready, f"{entry.digest[:12]}: ranks before the bytes")
        used = rank > 0
        for table in (self.tables.a_offset, self.tables.b_offset):
            offsets = table[entry.slot][used] - entry.run.offset
            inside = bool(((offsets >= 0) & (offsets < entry.run.num_bytes)).all())
            require(inside, f"{entry.digest[:12]}: factors outside of the run")

    def _entry(self, ref: AdapterRef) -> Entry:
        """An idle image that is not the proved one is dropped; one in use serves nobody new."""
        entry = self._entries.setdefault(ref.digest, Entry(ref.digest))
        entry.proved = ref.checksum or entry.proved
        if entry.is_wrong and not entry.leases and entry.loading is None:
            self._free_device(entry)
            entry.image = None
        return entry

    def _failure(self, entry: Entry) -> AdapterUnavailable | None:
        """Why the last load failed, until it is time to try again."""
        if entry.failure is not None and self._clock() >= entry.failure[1]:
            entry.failure = None
        return None if entry.failure is None else entry.failure[0]

    def _is_idle(self, entry: Entry) -> bool:
        is_needed = entry.leases or entry in self._pinned or self._is_awaited(entry)
        return entry.is_ready and not is_needed

    def _is_awaited(self, entry: Entry) -> bool:
        return entry.asked_at_poll >= self._num_polls - 1

    def _advance(self, entry: Entry) -> None:
        """The next thing that brings the adapter nearer to the device, if there is one to do."""
        if entry.loading or entry.slot is not None or self._failure(entry):
            return
        if entry.image is None:
            self._fetch(entry)
        else:
            self._copy(entry, entry.image)

    def _fetch(self, entry: Entry) -> None:
        if entry.loading is None:
            self._submit(entry, partial(self._loader.fetch, entry.digest, entry.proved))

    def _copy(self, entry: Entry, image: AdapterImage) -> None:
        if not self._free_slots and not self.evict_idle():
            return
        run = self._take_run(image.num_bytes)
        if run is None:
            return
        entry.run, entry.slot = run, self._free_slots.pop()
        target = self._arena[run.offset : run.offset + image.num_bytes]
        self._submit(entry, partial(self._loader.copy, image, target))

    def _take_run(self, num_bytes: int) -> Run | None:
        while (run := self._runs.allocate(num_bytes)) is None:
            if self.evict_idle():
                continue
            could_fit = self._runs.num_used_bytes + num_bytes <= self._runs.capacity_bytes
            if not could_fit or not self._reclaim():
                return None
        return run

    def _submit(self, entry: Entry, load: Callable[[], AdapterImage]) -> None:
        future = self._executor.submit(load)
        entry.loading = future
        future.add_done_callback(lambda done: self._done.put((entry, done)))

    def _finish(self, entry: Entry, future: Future[AdapterImage]) -> None:
        """A fetch or a copy of this entry has ended."""
        error = future.exception()
        if error is not None:
            self._fail(entry, error)
            return
        image = future.result()
        if image.num_bytes > self._runs.capacity_bytes:
            message = f"{image.num_bytes} bytes, adapters have {self._runs.capacity_bytes}"
            self._fail(entry, AdapterUnavailable("adapter.too_large", message))
            return
        self._faults.pop(entry.digest, None)
        entry.image, entry.checksum = image, image.checksum
        if entry.is_wrong:
            self._free_device(entry)
            entry.image = None
            self._forget(entry)
            return
        self._write_tables(entry, image)
        if entry.slot is None and self._is_awaited(entry):
            self._copy(entry, image)
        self._trim_host(newest=entry)

    def _fail(self, entry: Entry, error: BaseException) -> None:
        self._free_device(entry)
        entry.image = None
        if not isinstance(error, AdapterUnavailable):
            error = AdapterUnavailable("adapter.load_failed", f"{type(error).__name__}: {error}")
        entry.failure = (error, self._clock() + self._retry_s)
        self._faults[entry.digest] = error
        self._faults.move_to_end(entry.digest)
        if len(self._faults) > MAX_FAULTS:
            self._faults.popitem(last=False)
        for other in list(self._entries.values()):
            if self._failure(other) is None:
                self._forget(other)

    def _write_tables(self, entry: Entry, image: AdapterImage) -> None:
        """The slot, until now without ranks, begins to serve."""
        if entry.slot is None or entry.run is None:
            return
        tables, slot, offset = image.tables, entry.slot, entry.run.offset
        self.tables.a_offset[slot] = torch.from_numpy(tables.a_offset + offset)
        self.tables.b_offset[slot] = torch.from_numpy(tables.b_offset + offset)
        self.tables.rank[slot] = torch.from_numpy(tables.rank.copy())
        entry.max_rank = int(tables.rank.max())

    def _free_device(self, entry: Entry) -> None:
        """Nobody reads the slot any more: neither a lease nor a load."""
        if entry.slot is None or entry.run is None:
            return
        self.tables.rank[entry.slot].zero_()
        self._free_slots.append(entry.slot)
        self._runs.free(entry.run)
        entry.run = entry.slot = None

    def _trim_host(self, newest: Entry | None = None) -> None:
        """Lets the least used images go until the rest fits."""
        now = self._clock()
        loaded = [e for e in self._entries.values() if e.image is not None and e.loading is None]
        loaded.sort(key=lambda e: (e is not newest, -e.decayed_uses(now), -e.used_at, e.digest))
        num_bytes = 0
        for entry in loaded:
            num_bytes += entry.image.num_bytes if entry.image else 0
            if num_bytes > self._host_bytes:
                entry.image = None
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Nothing is left of it but its file."""
        is_empty = not (entry.loading or entry.image or entry.failure or entry in self._pinned)
        if is_empty and entry.slot is None:
            self._entries.pop(entry.digest, None)


def _use_one_thread() -> None:
    """The loader leaves the cores to the step: no OpenMP team of its own."""
    torch.set_num_threads(1)
