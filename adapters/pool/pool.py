"""Adapters of one base model: which are on the device and on the host, and which may be used.

    store  --fetch-->  host (packed image)  --copy-->  device (memory, a table slot)

Methods are called with the memory lock held: by the engine thread between two steps, by other
threads while a step computes. Hence loads start when a request arrives, even during a step.
Adapters that a step reads are leased, so that they are not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from adapters.errors import AdapterUnavailable
from adapters.pool.device import DeviceTier
from adapters.pool.host import HostTier
from adapters.pool.loads import Loads
from adapters.pool.source import AdapterLease, AdapterRef, Loading, NoRoom
from adapters.pool.tiers import AWAITED_POLLS, AdapterEntry, AdapterResidency
from memory.accounts import NO_TENANT, Accounts, Tenant
from memory.errors import require
from memory.eviction.adapter_memory import AdapterMemory
from memory.reuse import ReuseByKey


class AdapterPool:
    """`AdapterSource` over disk, host and device, each bounded in bytes.

    An adapter is charged to the tenant that last requested it. An adapter that does not fit into a
    tier even on its own is refused (adapter.too_large).

    host, requests, accounts: shared by all base models. All methods except `close` are called with
    the memory lock held.
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        loads: Loads,
        *,
        requests: ReuseByKey,
        accounts: Accounts,
        num_pools: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """num_pools: returns the number of pools that share the device's memory."""
        self.device = device
        self.loads = loads
        self._host = host
        self._requests = requests
        self._accounts = accounts
        self._num_pools = num_pools
        self._clock = clock
        self._entries: dict[str, AdapterEntry] = {}
        self._pins: dict[str, AdapterEntry] = {}
        self._awaited: dict[AdapterEntry, None] = {}
        """Entries that a caller may be waiting for."""

    @property
    def is_leased(self) -> bool:
        """Whether any adapter is leased."""
        return any(entry.leases for entry in self.device.entries)

    @property
    def is_loading(self) -> bool:
        return self.loads.num_open > 0

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the host for a queued request of the tenant."""
        entry = self._entry(ref, tenant)
        entry.reuse.note(self._clock())
        if entry.image is None and entry.slot is None:
            self.loads.fetch(entry)

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the device. An `acquire` will follow at the next step."""
        self._await(self._entry(ref, tenant))

    def cancel(self, ref: AdapterRef) -> None:
        """Cancels a load that has not started, because no caller needs the adapter any longer."""
        entry = self._entries.get(ref.digest)
        if entry is None or entry.digest in self._pins:
            return
        entry.awaited_polls = 0
        self.loads.cancel(entry)
        self.forget(entry)

    def acquire(
        self, ref: AdapterRef, tenant: Tenant = NO_TENANT
    ) -> AdapterLease | Loading | NoRoom:
        """Implements `AdapterSource.acquire`. A failed load is retried after some seconds."""
        entry = self._entry(ref, tenant)
        if entry.is_proved and ref.checksum not in ("", entry.proved):
            message = f"the image of {ref.digest} is {entry.checksum}, not {ref.checksum}"
            raise AdapterUnavailable("adapter.image.mismatch", message)
        if entry.slot is not None and entry.is_ready and not entry.is_wrong:
            entry.awaited_polls = 0
            entry.leases += 1
            num_loaded, entry.num_unpaid_bytes = entry.num_unpaid_bytes, 0
            return AdapterLease(entry.slot, entry.max_rank, entry.checksum, num_loaded, entry)
        error = self.loads.failures.recent(entry)
        if error is not None:
            raise AdapterUnavailable(error.code, str(error))
        self._await(entry)
        if entry.slot is None and entry.loading is None:
            return NoRoom(0 if entry.image is None else entry.image_bytes)
        return Loading()

    def is_ready(self, ref: AdapterRef) -> bool:
        """Whether `acquire` can return the adapter without loading it."""
        entry = self._entries.get(ref.digest)
        return entry is not None and entry.is_ready

    def num_missing_bytes(self, ref: AdapterRef) -> int:
        """Returns the bytes that the adapter needs on the device if only the host has it, else
        0."""
        entry = self._entries.get(ref.digest)
        if entry is None or entry.image is None or entry.slot is not None:
            return 0
        return entry.image_bytes

    def may_displace(self, ref: AdapterRef, other: str) -> bool:
        """Whether adapter `other` (a digest) would be evicted for `ref` once `other` is idle."""
        return self.device.may_displace(self._entry(ref), self._entries[other])

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        """Evicts every idle adapter, including `ref`, so that it can be placed again in fewer
        extents. Returns False if no other adapter was idle. Without this method, a sequence whose
        adapter fits alone could fail for lack of memory."""
        idle = list(self.device.idle(with_awaited=True))
        own = self._entries.get(ref.digest)
        if all(own is not None and placement is own.placement for placement in idle):
            return False
        for placement in idle:
            self.device.evict(placement)
        return True

    def keep(self, refs: Iterable[AdapterRef]) -> None:
        """Makes `refs` the adapters to pin on the device. `poll` loads and pins them, up to half of
        the pool's share of adapter memory and half of its slots."""
        wanted = {ref.digest: ref for ref in refs}
        for digest in self._pins.keys() - wanted.keys():
            entry = self._pins.pop(digest)
            entry.is_pinned = False
            self.forget(entry)
        self._pins |= {digest: self._entry(ref) for digest, ref in wanted.items()}

    def poll(self) -> None:
        """Re-enables failed loads after a while, and loads pinned adapters. Called at each step."""
        self.device.poll()
        for entry in self.loads.failures.due():
            self.forget(entry)
        for entry in list(self._awaited):
            entry.awaited_polls = max(entry.awaited_polls - 1, 0)
            if not entry.is_awaited:
                del self._awaited[entry]
                self.forget(entry)
        self._load_pins()

    def host_worth(self, entry: AdapterEntry) -> tuple[bool, float]:
        """Implements `Holder.host_worth`."""
        is_awaited = entry.slot is None and (entry.is_pinned or entry.is_awaited)
        is_cached = self.loads.far_tier(entry.digest) == "disk"
        return is_awaited, entry.host_loss_s(self._clock(), is_cached=is_cached)

    def forget(self, entry: AdapterEntry) -> None:
        """Removes the entry if it is empty (see `AdapterEntry.is_empty`). Ignores an entry that
        another entry of the same digest has replaced."""
        is_known = self._entries.get(entry.digest) is entry
        if is_known and entry.is_empty and entry.digest not in self._pins:
            del self._entries[entry.digest]

    def leave_device(self) -> None:
        """Evicts all adapters from the device, because their base model is unloaded. Host images
        stay. No lease may be held."""
        self.device.is_here = False
        for entry in self.device.entries:
            require(entry.leases == 0, f"{entry.digest[:12]} is leased")
            if entry.is_ready:
                self.device.free(entry)
            else:
                self.loads.cancel(entry)

    def status(self) -> list[AdapterResidency]:
        """Returns the adapters that are loaded, loading or awaited, then others whose last load
        failed. Adapters only on disk are omitted, because there may be tens of thousands."""
        faults = self.loads.failures.faults
        near = [
            AdapterResidency(
                e.digest, e.tier, e.num_bytes, e.leases, e.is_pinned, faults.get(e.digest), e.name
            )
            for e in self._entries.values()
        ]
        return near + [
            AdapterResidency(digest, self.loads.far_tier(digest), 0, 0, False, error)
            for digest, error in faults.items()
            if digest not in self._entries
        ]

    def close(self) -> None:
        """Waits for running loads and frees all memory. Call it without the lock and leases."""
        with self.device.lock:
            self._pins.clear()
            for entry in list(self._entries.values()):
                entry.is_pinned, entry.awaited_polls = False, 0
                self.loads.cancel(entry)
        self.loads.close()
        with self.device.lock:
            for entry in list(self._entries.values()):
                self._host.drop(entry)
                self.device.free(entry)
            self._entries.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, placements, tables, leases and bytes agree."""
        entries = list(self._entries.values())
        self._host.check_integrity(self, entries)
        self.loads.check_integrity(entries)
        self.device.check_integrity(entries)

    def _entry(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> AdapterEntry:
        """Returns the adapter's entry, creating it if needed. Charges it to the tenant, if any.

        Records the checksum in `ref` as proved, unless a proved image is loaded or a load is
        running. Drops an idle image with another checksum; a leased one gets no new leases.
        """
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
            self.device.free(entry)
            self._entries[ref.digest] = entry
        if tenant.name != NO_TENANT.name:
            self._accounts.note(tenant)
            entry.account = tenant.name
            self.device.charge(entry)
        return entry

    def _await(self, entry: AdapterEntry) -> None:
        """Records that a caller needs the adapter on the device, and starts the next load."""
        entry.awaited_polls = AWAITED_POLLS
        self._awaited[entry] = None
        if entry.loading is not None:
            entry.loading.is_awaited = True
        self.loads.advance(entry)

    def _load_pins(self) -> None:
        """Loads and pins adapters in order, up to half of the pool's bytes and of its slots."""
        num_bytes = self.device.capacity_bytes // (2 * self._num_pools())
        num_slots = self.device.num_slots // 2
        for entry in self._pins.values():
            size = AdapterMemory.rounded(entry.image_bytes)
            entry.is_pinned = 0 < size <= num_bytes and num_slots > 0
            if entry.is_pinned:
                num_bytes, num_slots = num_bytes - size, num_slots - 1
                self.loads.advance(entry)
            elif not size:
                self.loads.fetch(entry)
