"""Loads the adapters of one base model to the host and the device, and leases them to sequences.

    store  --fetch-->  host (packed image)  --copy-->  device (memory, a table slot)

The engine thread calls the methods between two steps. Other threads call them while a step is
computed, too, so that a load can start as soon as a request arrives. Adapters that a step reads are
leased, so that they are not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from adapters.pool.loads import Loads
from adapters.pool.source import (
    AdapterLease,
    AdapterTurn,
    AdapterUnavailable,
    AdapterUse,
    Loading,
    NoRoom,
)
from adapters.pool.tiers import AWAITED_STEPS, AdapterEntry
from adapters.pool.turns import AdapterTurns
from adapters.reference import AdapterRef
from memory.accounts import FIRST_TURN, LAST_TURN, NO_TENANT, Tenant, Turn
from memory.errors import require
from memory.eviction.adapter_memory import AdapterMemory
from memory.reuse import ReuseByKey


class AdapterPool:
    """`AdapterSource` that keeps adapters on disk, host and device, each bounded in bytes.

    An adapter is charged to the tenant that last requested it. An adapter that is too large for one
    of disk, host and device is refused (adapter.too_large).

    requests: recent requests for each adapter, shared by all base models. All methods except
    `close` are called with the memory lock held.
    """

    def __init__(self, loads: Loads, *, requests: ReuseByKey, clock: Callable[[], float]) -> None:
        self.device = loads.device
        self.loads = loads
        self._requests = requests
        self._clock = clock
        self.entries: dict[str, AdapterEntry] = {}
        """Adapters that are loaded, loading, awaited, to be pinned or recently failed, by digest.
        Adapters only on disk are omitted, because there may be tens of thousands."""
        self._pins: dict[str, AdapterEntry] = {}
        self.awaited: dict[AdapterEntry, None] = {}
        """Entries that a caller may be waiting for."""
        self._turns = AdapterTurns(self.missing_bytes, self._may_displace)

    @property
    def is_busy(self) -> bool:
        return self.loads.num_open > 0 or any(entry.leases for entry in self.entries.values())

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        entry = self._entry(ref, tenant)
        entry.reuse = self._requests.of(ref.digest)
        entry.reuse.note(self._clock())
        if entry.image is None and entry.slot is None:
            self.loads.fetch(entry)

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        if self._turns.is_open:
            self._load(self._entry(ref, tenant), tenant, FIRST_TURN)

    def cancel(self, ref: AdapterRef) -> None:
        self._turns.forget(ref.digest)
        entry = self.entries.get(ref.digest)
        if entry is not None and not entry.is_kept:
            entry.awaited_steps = 0
            self.loads.cancel(entry)
            entry.forget()

    def acquire(
        self, ref: AdapterRef, turn: AdapterTurn | None = None
    ) -> AdapterLease | Loading | NoRoom:
        """Implements `AdapterSource.acquire`. A failed load is retried after some seconds."""
        if turn is None:
            answer = self._acquire(ref, NO_TENANT, FIRST_TURN)
            if isinstance(answer, AdapterLease):
                answer.pay()  # for nobody
            return answer
        return self._turns.acquire(ref, turn, partial(self._acquire, ref))

    def _acquire(
        self, ref: AdapterRef, tenant: Tenant, place: Turn
    ) -> AdapterLease | Loading | NoRoom:
        """Leases the adapter, or starts to load it. place: place of the request among the
        tenant's requests."""
        entry = self._entry(ref, tenant)
        if entry.is_proved and ref.checksum not in ("", entry.proved):
            message = f"the image of {ref.digest} is {entry.checksum}, not {ref.checksum}"
            raise AdapterUnavailable("adapter.image.mismatch", message)
        if entry.slot is not None and entry.is_ready and not entry.is_wrong:
            entry.awaited_steps = 0
            entry.turns.clear()
            entry.leases += 1
            num_loaded, entry.num_unpaid_bytes = entry.num_unpaid_bytes, 0
            values = entry.slot, entry.max_rank, entry.checksum, num_loaded, entry
            return AdapterLease(*values, entry.cost.copy_s(num_loaded))
        error = self.loads.failures.recent(entry)
        if error is not None:
            raise AdapterUnavailable(error.code, str(error))
        self._load(entry, tenant, place)
        if entry.slot is None and entry.loading is None:
            return NoRoom(0 if entry.image is None else entry.image_bytes)
        return Loading()

    def _load(self, entry: AdapterEntry, tenant: Tenant, place: Turn) -> None:
        entry.awaited_steps = AWAITED_STEPS
        entry.turns[tenant.name] = place
        self.awaited[entry] = None
        self.loads.advance(entry)

    def missing_bytes(self, ref: AdapterRef) -> int | None:
        """Returns the number of bytes that must be copied to the device before the adapter can be
        leased: 0 if it is on the device, and otherwise the size of its image on the host. Returns
        None if the adapter is loading, or neither on the device nor on the host."""
        entry = self.entries.get(ref.digest)
        if entry is None or entry.loading is not None:
            return None
        if entry.slot is not None:
            return 0
        return None if entry.image is None else entry.image_bytes

    def _may_displace(self, ref: AdapterRef, other: str) -> bool:
        return self.device.may_displace(self._entry(ref), self.entries[other])

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        """Implements `AdapterSource.evict_all_idle`. Evicts even `ref`, so that it can be placed
        again in fewer extents. Otherwise a sequence could fail for lack of memory although its
        adapter would fit into empty memory."""
        idle = list(self.device.idle(with_awaited=True))
        own = self.entries.get(ref.digest)
        if all(own is not None and placement is own.placement for placement in idle):
            return False
        for placement in idle:
            self.device.evict(placement)
        return True

    def keep(self, refs: Iterable[AdapterRef]) -> None:
        """Makes `refs` the adapters to pin on the device. `begin_step` loads and pins them, up to
        half of the pool's share of adapter memory and half of the pool's slots."""
        wanted = {ref.digest: ref for ref in refs}
        for digest in self._pins.keys() - wanted.keys():
            entry = self._pins.pop(digest)
            entry.is_kept = entry.is_pinned = False
            entry.forget()
        for digest, ref in wanted.items():
            self._pins[digest] = self._entry(ref)
            self._pins[digest].is_kept = True

    def begin_step(self, in_use: Iterable[AdapterUse]) -> bool:
        """Implements `AdapterSource.begin_step`. Allows failed loads to be retried after `RETRY_S`,
        and loads pinned adapters."""
        self.device.poll()
        for entry in self.loads.failures.due():
            entry.forget()
        for entry in list(self.awaited):
            entry.awaited_steps = max(entry.awaited_steps - 1, 0)
            if not entry.is_awaited:
                del self.awaited[entry]
                entry.forget()
        num_bytes, num_slots = self.device.share_bytes // 2, self.device.num_slots // 2
        for entry in self._pins.values():
            size = AdapterMemory.rounded(entry.image_bytes)
            entry.is_pinned = 0 < size <= num_bytes and num_slots > 0
            if entry.is_pinned:
                num_bytes, num_slots = num_bytes - size, num_slots - 1
                self.loads.advance(entry)
            elif not size:
                self.loads.fetch(entry)
        self._turns.begin(self._clock(), in_use)
        return not self._turns.lacks_pages

    def leave_device(self) -> None:
        """Evicts all adapters from the device, because their base model is unloaded. Host images
        stay. No lease may be held."""
        self.device.is_here = False
        for entry in list(self.entries.values()):
            require(entry.leases == 0, f"{entry.digest[:12]} is leased")
            if entry.is_ready:
                self.device.free(entry)
            elif entry.slot is not None:
                self.loads.cancel(entry)

    def close(self) -> None:
        """Waits for running loads and frees all memory. The caller must hold no lock or lease."""
        with self.loads.lock:
            self.keep(())
            for entry in list(self.entries.values()):
                entry.awaited_steps = 0
                self.loads.cancel(entry)
        self.loads.close()
        with self.loads.lock:
            for entry in list(self.entries.values()):
                self.loads.unload(entry)
            self.entries.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, placements, tables, leases and bytes agree."""
        self.loads.check_integrity(self.entries)

    def _entry(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> AdapterEntry:
        """Returns the adapter's entry, creating it if needed. Charges the adapter to the tenant, if
        any. From now on, images must have the checksum in `ref`, if any. The required checksum is
        not changed while a load is running, or while an image is loaded that has the checksum
        required so far. A loaded image with another checksum gets no new leases, and is dropped
        once its leases are released."""
        entry = self.entries.get(ref.digest)
        if entry is None:
            entry = self.entries[ref.digest] = AdapterEntry(
                ref.digest, self.entries, self.loads.far_tier, self._requests.of(ref.digest)
            )
            entry.cost = self.loads.cost
        entry.name = ref.name or entry.name
        entry.is_ephemeral, entry.signed = ref.is_ephemeral, ref.signed
        if ref.checksum not in ("", entry.proved) and not (entry.is_proved or entry.loading):
            entry.proved, entry.failure = ref.checksum, None
        if entry.is_wrong and not entry.leases and entry.loading is None:
            self.loads.unload(entry)
            self.entries[ref.digest] = entry
        if tenant.name != NO_TENANT.name:
            self.device.charge(entry, tenant)
            entry.turns.setdefault(tenant.name, LAST_TURN)
        return entry
