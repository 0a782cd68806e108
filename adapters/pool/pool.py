"""Adapters of one base model: which are on the device and on the host, and which may be used.

    store  --fetch-->  host (packed image)  --copy-->  device (arena memory, a table slot)

Methods are called with the memory lock held: by the engine thread between two steps, by others
while a step computes. So loads start when a request arrives, even during a step. Adapters that a
step reads are leased, and stay. Two threads load without the lock. One fetches by digest and may
wait long for the store. One copies images to arena memory that is not read yet, which is fast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from adapters.errors import AdapterUnavailable
from adapters.manifest import BaseModelShape
from adapters.pool.failures import Failures
from adapters.pool.host_slab import HostSlab
from adapters.pool.host_tier import HostTier
from adapters.pool.image import AdapterImage, ImageCache
from adapters.pool.loader import AdapterLoader, one_thread
from adapters.pool.lora import ImageLayout
from adapters.pool.slots import Slots
from adapters.pool.source import AdapterLease, AdapterRef, Loading, NoRoom, Tier
from adapters.pool.tiers import AdapterEntry, AdapterResidency
from adapters.store.folder import Store
from memory.accounts import NO_TENANT, Ask, BytesHeld, Tenant
from memory.adapter_memory import AdapterMemory, Placement
from memory.broker import MemoryBroker
from memory.copy_queue import Copy, CopyQueue
from memory.errors import require
from memory.loss import Idle
from memory.reuse import ReuseByKey
from ops.base import AdapterTables, Ops

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loads:
    """Number of loads, and their total seconds including time in the queue."""

    number: int = 0
    seconds: float = 0.0


class AdapterPool:
    """Leases on adapters of one base model over disk, host and device, each bounded in bytes.

    Evicts from the account that holds the most for its weight, and there the adapter with the
    lowest reload time per byte, weighted by its expected reuse. An adapter is charged to the tenant
    that last requested it. An adapter that alone is too large for a tier is refused by name.

    memory: uint8, of the device; divided by `placements` and traded by `broker`. host, cache, requests,
    slab: shared by all base models. executor: runs all loads; None uses two threads of its own. All
    methods except `close` are called with `broker.lock` held.
    """

    def __init__(
        self,
        memory: Tensor,
        placements: AdapterMemory,
        broker: MemoryBroker,
        *,
        store: Store,
        ops: Ops,
        shape: BaseModelShape,
        dtype: torch.dtype,
        num_slots: int,
        host: HostTier,
        cache: ImageCache,
        requests: ReuseByKey,
        clock: Callable[[], float],
        slab: HostSlab | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._memory = memory
        self._placements = placements
        self._broker = broker
        self._clock = clock
        self._requests = requests
        self._ops = ops
        self._loader = AdapterLoader(store, shape, dtype, ops, cache, slab)
        self._accounts = broker.bytes_held.accounts
        self._host = host
        self._largest = {
            "device": placements.capacity_bytes,
            "host": host.max_bytes,
            "disk": cache.max_bytes,
        }
        """Maximum bytes of one adapter, by tier."""
        self._failures = Failures(clock)
        self.num_evictions = 0
        self.loads = {"host": Loads(), "device": Loads()}
        """Loads to each tier from the next lower one, since the start."""
        self.num_failed_loads = 0
        self.is_on_device = True
        """Whether the base model is on the device. If not, adapters load to the host only."""
        names = () if executor else ("adapter-fetcher", "adapter-copier")
        self._threads = [one_thread(name) for name in names]
        """Threads that this pool owns."""
        fetcher, copier = (executor, executor) if executor else self._threads
        self._fetches = CopyQueue[AdapterImage](fetcher, broker.lock)
        self._copies = CopyQueue[AdapterImage](copier, broker.lock)
        self._entries: dict[str, AdapterEntry] = {}
        self._resident: dict[Placement, AdapterEntry] = {}
        self._pins: dict[str, AdapterEntry] = {}
        self._roomless: set[AdapterEntry] = set()
        """Entries whose images found no room on the host. They are remembered with their sizes
        while a caller waits, so that the images are fetched again only once there is room."""
        self._slots = Slots(num_slots, shape.num_layers, len(shape.projections), ops)
        self._num_polls = 0
        self._refused: dict[str, int] = {}
        """Bytes of the last failed device allocation by account, until the next `poll`."""
        broker.add_holder(self)

    @property
    def layout(self) -> ImageLayout:
        """Layout of the packed images."""
        return self._loader.layout

    @property
    def is_leased(self) -> bool:
        """Whether any adapter is leased."""
        return any(entry.leases for entry in self._resident.values())

    @property
    def tables(self) -> AdapterTables:
        return self._slots.tables

    @property
    def is_loading(self) -> bool:
        return self._fetches.num_open + self._copies.num_open > 0

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the host for a queued request of the tenant."""
        entry = self._entry(ref)
        self._charge(entry, tenant)
        entry.reuse.note(self._clock())
        if entry.image is None and entry.slot is None:
            self._fetch(entry)

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the device. An `acquire` will follow at the next step."""
        entry = self._entry(ref)
        self._charge(entry, tenant)
        self._want(entry)

    def cancel(self, ref: AdapterRef) -> None:
        """Cancels a load that has not started, because no caller needs the adapter any longer."""
        entry = self._entries.get(ref.digest)
        if entry is None or entry.digest in self._pins:
            return
        entry.asked_at_poll = -2
        self._drop_load(entry)
        self.forget(entry)

    def acquire(
        self, ref: AdapterRef, tenant: Tenant = NO_TENANT
    ) -> AdapterLease | Loading | NoRoom:
        """Implements `AdapterSource.acquire`. A failed load is retried after a while."""
        entry = self._entry(ref)
        self._charge(entry, tenant)
        if entry.is_proved and ref.checksum not in ("", entry.proved):
            message = f"the image of {ref.digest} is {entry.checksum}, not {ref.checksum}"
            raise AdapterUnavailable("adapter.image.mismatch", message)
        if entry.slot is not None and entry.is_ready and not entry.is_wrong:
            entry.asked_at_poll = -2
            entry.leases += 1
            num_loaded, entry.num_unpaid_bytes = entry.num_unpaid_bytes, 0
            return AdapterLease(entry.slot, entry.max_rank, entry.checksum, num_loaded, entry)
        error = self._failures.recent(entry)
        if error is not None:
            raise AdapterUnavailable(error.code, str(error))
        self._want(entry)
        if entry.slot is None and entry.loading is None:
            return NoRoom(0 if entry.image is None else entry.image_bytes)
        return Loading()

    def is_ready(self, ref: AdapterRef) -> bool:
        """Whether `acquire` need not load the adapter."""
        entry = self._entries.get(ref.digest)
        return entry is not None and entry.is_ready

    def num_missing_bytes(self, ref: AdapterRef) -> int:
        """Returns the bytes that an adapter on the host alone needs on the device, else 0."""
        entry = self._entries.get(ref.digest)
        if entry is None or entry.image is None or entry.slot is not None:
            return 0
        return entry.image_bytes

    def may_displace(self, ref: AdapterRef, other: str) -> bool:
        """Whether adapter `other` (a digest) would be evicted for `ref` once it is idle."""
        entry = self._entry(ref)
        is_first = self._is_first(entry.account)
        asks = [Ask(self._broker.bytes_held, entry.account, entry.image_bytes, is_first=is_first)]
        if not self._slots.num_free:
            asks.append(self._ask_for_slot(entry.account, is_first=is_first))
        return all(ask.may_take(self._entries[other].account) for ask in asks)

    def keep(self, refs: Iterable[AdapterRef]) -> None:
        """Loads exactly these adapters to the device and pins them there, as far as they fit into
        half of the adapters' bytes and slots."""
        wanted = {ref.digest: ref for ref in refs}
        for digest in self._pins.keys() - wanted.keys():
            entry = self._pins.pop(digest)
            entry.is_pinned = False
            self.forget(entry)
        self._pins |= {digest: self._entry(ref) for digest, ref in wanted.items()}

    def poll(self) -> None:
        """Re-enables failed loads that are due, and loads pinned adapters. Called at each step."""
        self._num_polls += 1
        self._refused.clear()
        for entry in self._failures.over():
            self.forget(entry)
        for entry in [entry for entry in self._roomless if not self._is_awaited(entry)]:
            self._roomless.remove(entry)
            self.forget(entry)
        self._keep_pins()

    def idle(self, *, with_awaited: bool) -> Mapping[Placement, Idle]:
        now = self._clock()
        return {
            placement: Idle((entry.account,), entry.device_loss_s(now))
            for placement, entry in self._resident.items()
            if self._is_idle(entry) and (with_awaited or not self._is_awaited(entry))
        }

    def evict(self, placement: Placement) -> None:
        """Evicts an idle adapter from the device."""
        self.num_evictions += 1
        self._free_device(self._resident[placement])

    def free_slot(self, account: str = NO_TENANT.name, *, is_first: bool = True) -> bool:
        """Evicts an idle adapter to free a slot for the account: of the account with the most slots
        for its weight, the one of least loss per byte. Returns False if none."""
        ask = self._ask_for_slot(account, is_first=is_first)
        losses = {
            placement: (ask.priority(*lost.accounts), lost.cost_s / placement.num_bytes)
            for placement, lost in self.idle(with_awaited=False).items()
            if ask.may_take(*lost.accounts)
        }
        if losses:
            self.evict(min(losses, key=losses.__getitem__))
        return bool(losses)

    def host_worth(self, entry: AdapterEntry) -> tuple[bool, float]:
        """Implements `Holder.host_worth`."""
        is_awaited = entry.slot is None and (entry.is_pinned or self._is_awaited(entry))
        is_cached = self._loader.is_cached(entry.digest)
        return is_awaited, entry.host_loss_s(self._clock(), is_cached=is_cached)

    def forget(self, entry: AdapterEntry) -> None:
        """Removes the entry if nothing but its file is left. An entry that was replaced by another
        of the same digest is left alone."""
        is_known = self._entries.get(entry.digest) is entry
        is_needed = entry.digest in self._pins or entry in self._roomless
        if is_known and entry.is_empty and not is_needed:
            del self._entries[entry.digest]

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        """Evicts every idle adapter, including this one, so that it can be placed again without
        fragmentation. Returns False if no other adapter was idle. Without it, a sequence whose
        adapter fits alone could fail for lack of memory."""
        idle = list(self.idle(with_awaited=True))
        if all(self._resident[placement].digest == ref.digest for placement in idle):
            return False
        for placement in idle:
            self.evict(placement)
        return True

    def leave_device(self) -> None:
        """Evicts all adapters from the device, because their base model is unloaded. Host images
        stay. No lease may be held."""
        self.is_on_device = False
        for entry in list(self._resident.values()):
            require(entry.leases == 0, f"{entry.digest[:12]} is leased")
            if entry.is_ready:
                self._free_device(entry)
            else:
                self._drop_load(entry)

    def status(self) -> list[AdapterResidency]:
        """Returns the adapters nearer than the disk, then those known for a failure. Adapters on
        disk alone are omitted, because there may be tens of thousands."""
        fault = self._failures.faults.get
        near = [
            AdapterResidency(
                e.digest, e.tier, e.num_bytes, e.leases, e.is_pinned, fault(e.digest), e.name
            )
            for e in self._entries.values()
        ]
        return near + [
            AdapterResidency(digest, self._far_tier(digest), 0, 0, False, error)
            for digest, error in self._failures.faults.items()
            if digest not in self._entries
        ]

    def close(self) -> None:
        """Waits for running loads and frees all memory. Called without the lock or leases."""
        with self._broker.lock:
            self._pins.clear()
            for entry in list(self._entries.values()):
                entry.is_pinned, entry.asked_at_poll = False, -2
                self._drop_load(entry)
        for thread in self._threads:
            thread.shutdown()
        with self._broker.lock:
            for entry in list(self._entries.values()):
                self._host.drop(entry)
                self._free_device(entry)
            self._entries.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, allocations, tables, leases and bytes agree."""
        entries = list(self._entries.values())
        self._host.check_integrity(self, entries)
        loading = [entry for entry in entries if entry.loading is not None]
        num_copies = sum(entry.slot is not None for entry in loading)
        require(num_copies == self._copies.num_open, f"{num_copies} copies")
        num_fetches = len(loading) - num_copies
        require(num_fetches == self._fetches.num_open, f"{num_fetches} fetches")
        resident = {e.placement: e for e in entries if e.placement is not None}
        require(resident == self._resident, f"{len(resident)} on the device")
        require(
            all(self._placements.account_of(p) == entry.account for p, entry in resident.items()),
            "a placement is charged to another than its adapter",
        )
        for entry in entries:
            name = entry.digest[:12]
            require(
                (entry.placement is None) == (entry.slot is None), f"{name}: placement without slot"
            )
            require(entry.leases >= 0, f"{name}: {entry.leases} leases")
            require(entry.leases == 0 or entry.is_ready, f"{name}: leased, not on the device")
        places = {
            entry.slot: entry.placement
            for entry in entries
            if entry.slot is not None and entry.placement is not None
        }
        serving = {e.slot for e in entries if e.slot is not None and e.is_ready}
        self._slots.check_integrity(places, serving)
        self._placements.check_integrity()

    def _entry(self, ref: AdapterRef) -> AdapterEntry:
        """Returns the entry, creating it. Records the checksum in `ref` as proved, unless a proved
        image is loaded or a load is running. Drops an idle image with another checksum; one in use
        serves no new lease."""
        entry = self._entries.get(ref.digest)
        if entry is None:
            reuse = self._requests.of(ref.digest)
            entry = self._entries[ref.digest] = AdapterEntry(ref.digest, self, reuse)
        entry.name = ref.name or entry.name
        entry.is_ephemeral, entry.signed = ref.is_ephemeral, ref.signed
        if ref.checksum not in ("", entry.proved) and not (entry.is_proved or entry.loading):
            entry.proved, entry.failure = ref.checksum, None
        if entry.is_wrong and not entry.leases and entry.loading is None:
            self._host.drop(entry)
            self._free_device(entry)
            self._entries[ref.digest] = entry
        return entry

    def _charge(self, entry: AdapterEntry, tenant: Tenant) -> None:
        """Charges the adapter to the tenant, unless the request is no tenant's."""
        if tenant.name == NO_TENANT.name:
            return
        self._accounts.note(tenant)
        entry.account = tenant.name
        if entry.placement is not None:
            self._placements.charge(entry.placement, tenant.name)

    def _far_tier(self, digest: str) -> Tier:
        return "disk" if self._loader.is_cached(digest) else "store"

    def _is_idle(self, entry: AdapterEntry) -> bool:
        return entry.is_ready and not entry.leases and not entry.is_pinned

    def _is_awaited(self, entry: AdapterEntry) -> bool:
        return entry.asked_at_poll >= self._num_polls - 1

    def _keep_pins(self) -> None:
        """Pins and loads adapters in the order of pinning, up to half of the bytes and slots."""
        num_bytes = self._placements.capacity_bytes // (2 * self._broker.num_holders)
        num_slots = self._slots.count // 2
        for entry in self._pins.values():
            run_bytes = self._placements.rounded(entry.image_bytes)
            entry.is_pinned = 0 < run_bytes <= num_bytes and num_slots > 0
            if entry.is_pinned:
                num_bytes, num_slots = num_bytes - run_bytes, num_slots - 1
                self._advance(entry)
            elif not run_bytes:
                self._fetch(entry)

    def _want(self, entry: AdapterEntry) -> None:
        """Records that a caller needs the adapter on the device, and starts the next load."""
        entry.asked_at_poll = self._num_polls
        if entry.loading is not None:
            entry.loading.is_awaited = True
        self._advance(entry)

    def _advance(self, entry: AdapterEntry) -> None:
        """Starts the next load of the adapter towards the device, unless one is running."""
        if entry.loading is not None or entry.slot is not None:
            return
        if entry.image is None:
            self._fetch(entry)
        elif self.is_on_device:
            self._copy(entry, entry.image)

    def _fetch(self, entry: AdapterEntry) -> None:
        if entry.loading is not None or self._failures.recent(entry) is not None:
            return
        if entry.image_bytes and self._host.victims(entry) is None:
            return
        asked = entry.digest, entry.proved, entry.signed
        work = partial(self._loader.fetch, *asked, keeps_file=not entry.is_ephemeral)
        entry.load_times.source = self._far_tier(entry.digest)
        entry.load_times.fetch_begun_s = self._clock()
        self._submit(self._fetches, entry, work)

    def _copy(self, entry: AdapterEntry, image: AdapterImage) -> None:
        num_before = self.num_evictions
        placement = self._place(entry.account, image)
        if placement is None:
            return
        entry.load_times.num_evicted = self.num_evictions - num_before
        entry.placement, entry.slot = placement, self._slots.allocate()
        self._resident[placement] = entry

        def work() -> AdapterImage:
            payload = torch.from_numpy(image.payload)
            with self._ops.side_stream("adapters"):
                for offset, start, stop in placement.pieces:
                    target = self._memory[offset : offset + stop - start]
                    target.copy_(payload[start:stop], non_blocking=True)
            return image

        entry.load_times.copy_begun_s = self._clock()
        self._submit(self._copies, entry, work)

    def _is_first(self, account: str) -> bool:
        """Whether no adapter of the account on the device is in use or about to be."""
        own = (entry for entry in self._resident.values() if entry.account == account)
        return not any(e.leases or e.loading or self._is_awaited(e) for e in own)

    def _ask_for_slot(self, account: str, *, is_first: bool) -> Ask:
        slots = BytesHeld(self._accounts, ((e.account, 1) for e in self._resident.values()))
        return Ask(slots, account, 1, is_first=is_first)

    def _place(self, account: str, image: AdapterImage) -> Placement | None:
        """Allocates memory for the image, evicting idle adapters, and makes sure that a table slot
        is free. Returns None if there is no room."""
        num_bytes = image.num_bytes
        if num_bytes >= self._refused.get(account, num_bytes + 1):
            return None
        is_first = self._is_first(account)
        if not self._slots.num_free and not self.free_slot(account, is_first=is_first):
            self._refused[account] = 0
            return None
        ends = image.tables.factor_ends(num_bytes)
        placement = self._broker.allocate_adapter(ends, account, is_first=is_first)
        if placement is None:
            self._refused[account] = num_bytes
        return placement

    def _submit(
        self, queue: CopyQueue[AdapterImage], entry: AdapterEntry, work: Callable[[], AdapterImage]
    ) -> None:
        finish = partial(self._finish, entry, self._clock())
        entry.loading = Copy(work, finish, self._is_awaited(entry))
        queue.submit(entry.loading)

    def _drop_load(self, entry: AdapterEntry) -> None:
        """Cancels the entry's load unless it has started."""
        queue = self._fetches if entry.slot is None else self._copies
        if entry.loading is not None and queue.cancel(entry.loading):
            entry.loading = None
            self._free_device(entry)

    def _finish(
        self, entry: AdapterEntry, asked_s: float, image: AdapterImage | BaseException
    ) -> None:
        """Records the end of a fetch or copy."""
        entry.loading = None
        if isinstance(image, BaseException):
            self._fail(entry, image)
            return
        loads = self.loads["host" if entry.slot is None else "device"]
        loads.number += 1
        loads.seconds += self._clock() - asked_s
        try:
            self._take(entry, image)
        except Exception as error:
            # Otherwise the slot, half written, would be leased.
            log.exception("loading adapter %s failed", entry.digest)
            self._fail(entry, error)

    def _take(self, entry: AdapterEntry, image: AdapterImage) -> None:
        entry.image_bytes = image.num_bytes
        tier = min(self._largest, key=lambda tier: self._largest[tier])
        ends = image.tables.factor_ends(image.num_bytes)
        if image.num_bytes > self._largest[tier] or not self._placements.could_hold(ends):
            message = f"{image.num_bytes} bytes, the {tier} tier has {self._largest[tier]}"
            self._fail(entry, AdapterUnavailable("adapter.too_large", message))
            return
        self._failures.note_success(entry)
        entry.checksum = image.checksum
        if entry.slot is not None and entry.placement is not None:
            self._host.put(entry, image)
            if self.is_on_device:
                entry.max_rank = self._slots.write(entry.slot, image.tables, entry.placement)
                entry.num_unpaid_bytes = image.num_bytes
                entry.load_times.copied_s = self._clock()
            else:
                self._free_device(entry)
        else:
            self._arrive(entry, image)

    def _arrive(self, entry: AdapterEntry, image: AdapterImage) -> None:
        """Stores a fetched image on the host, or drops it for lack of room; callers retry."""
        entry.load_times.fetched_s = self._clock()
        victims = self._host.victims(entry)
        if victims is None:
            if self._is_awaited(entry):
                self._roomless.add(entry)
            self.forget(entry)
            return
        for victim in victims:
            self._host.drop(victim)
            victim.holder.forget(victim)
        self._host.put(entry, image)
        if self._is_awaited(entry) and self.is_on_device:
            self._copy(entry, image)

    def _fail(self, entry: AdapterEntry, error: BaseException) -> None:
        self.num_failed_loads += 1
        self._host.drop(entry)
        self._failures.note(entry, error)
        self._free_device(entry)

    def _free_device(self, entry: AdapterEntry) -> None:
        """Frees the adapter's device memory and slot. Neither a lease nor a load may use them."""
        if entry.slot is not None and entry.placement is not None:
            self._slots.free(entry.slot)
            self._placements.free(entry.placement)
            del self._resident[entry.placement]
            entry.placement = entry.slot = None
        self.forget(entry)
