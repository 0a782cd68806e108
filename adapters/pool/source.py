"""Interface through which the scheduler leases adapters on the device, or learns why it gets no
lease yet. Has no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from adapters.reference import AdapterRef
from memory.accounts import NO_TENANT, Tenant

AdapterTier = Literal["store", "disk", "host", "device", "loading"]
"""Location of an adapter. The status of a pool lists "store" only for an adapter whose last load
failed."""


Charge = tuple[float, float]
"""Charges of a sequence's class and tenant, comparable with those of other sequences."""


class Account(Protocol):
    """Account that is charged for the work of sequences."""

    @property
    def charge(self) -> Charge:
        """Present charge."""
        ...


class AdapterTurn(NamedTuple):
    """Turn of a waiting sequence that needs an adapter. patience_s: seconds that the sequence may
    wait for room before its adapter starves."""

    tenant: Tenant
    account: Account
    patience_s: float


class AdapterUse(NamedTuple):
    """Running sequence. digest: digest of its adapter, or None. num_left: largest number of tokens
    that it may still generate."""

    digest: str | None
    account: Account
    num_left: int


class AdapterLoad(NamedTuple):
    """Load of an adapter to the device. Times are in seconds of the source's clock."""

    tier: AdapterTier
    """Tier that the adapter was loaded from."""
    begun_s: float
    ended_s: float
    copy_begun_s: float
    num_evicted: int
    """Number of adapters evicted from the device to make room for this one."""


@dataclass(slots=True)
class LoadTimes:
    """Timestamps of an adapter's last loads to host and device, by the source's clock."""

    source: AdapterTier = "host"
    """Tier that the last fetch read from: disk or store."""
    work_s: float = 0.0
    """Seconds of the last load from one tier to the next, without its time in the queue."""
    fetch_begun_s: float = -math.inf
    fetched_s: float = -math.inf
    copy_begun_s: float = -math.inf
    copied_s: float = -math.inf
    num_evicted: int = 0

    def since(self, arrival_s: float) -> AdapterLoad | None:
        """Returns the load that put the adapter on the device after the time `arrival_s`. The load
        starts from the tier where the adapter was at that time. Returns None if the adapter was
        already on the device at that time."""
        if self.copied_s <= arrival_s:
            return None
        tier, begun_s = "host", self.copy_begun_s
        if self.fetched_s > arrival_s:
            tier, begun_s = self.source, self.fetch_begun_s
        return AdapterLoad(tier, begun_s, self.copied_s, self.copy_begun_s, self.num_evicted)


class Leased(Protocol):
    """Interface of an adapter on the device, with the attributes that leases use."""

    leases: int
    load_times: LoadTimes
    num_unpaid_bytes: int


@dataclass(slots=True)
class AdapterLease:
    """Right to use a slot. While a lease is held, the adapter's tables and bytes do not change."""

    slot: int
    max_rank: int
    checksum: str
    num_loaded_bytes: int
    """Bytes that were copied to the device for the holder of this lease."""
    _adapter: Leased | None
    copy_s: float = 0.0
    """Estimated seconds of this copy until they are paid, or 0 if there was none."""

    def load_since(self, arrival_s: float) -> AdapterLoad | None:
        """Returns the adapter's load (see `LoadTimes.since`). Returns None after `release`."""
        return None if self._adapter is None else self._adapter.load_times.since(arrival_s)

    def pay(self) -> float:
        """Returns the estimated seconds of the copy to the device, if there was one. The caller
        charges them; otherwise they are charged to a later lease."""
        copy_s, self.copy_s = self.copy_s, 0.0
        return copy_s

    def release(self) -> None:
        """Releases the lease. May be called twice."""
        if self._adapter is not None:
            if self.copy_s:
                self._adapter.num_unpaid_bytes = self.num_loaded_bytes
            self._adapter.leases -= 1
            self._adapter = None


@dataclass(frozen=True, slots=True)
class Loading:
    """Result of `acquire` while the adapter is loading, or while other adapters go first. Call
    `acquire` again at the next step."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Result of `acquire` if the adapter cannot be loaded now, because too little memory can be
    evicted for it."""

    num_bytes: int
    """Bytes that the adapter needs on the device; 0 if it needs room on the host first."""


class AdapterUnavailable(Exception):
    """Failure to load an adapter version, for example because it is missing, corrupt or too
    large."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class AdapterSource(Protocol):
    """Source of leases on the adapters of one base model. It decides whose adapter is loaded next.
    Methods are called with the memory lock held, and never wait for a load."""

    @property
    def is_busy(self) -> bool:
        """Whether any adapter is loading or leased."""
        ...

    def begin_step(self, in_use: Iterable[AdapterUse]) -> bool:
        """Called at the start of each step. Returns whether sequences without an adapter may start.
        They may not while running sequences must free pages for an adapter. in_use: sequences that
        run, or that a step in flight computes."""
        ...

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the host for a queued request of the tenant."""
        ...

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the device, unless other adapters go first. The caller
        calls `acquire` at the next step."""
        ...

    def cancel(self, ref: AdapterRef) -> None:
        """Cancels a load that has not started, because no sequence needs the adapter any longer."""
        ...

    def acquire(
        self, ref: AdapterRef, turn: AdapterTurn | None = None
    ) -> AdapterLease | Loading | NoRoom:
        """Leases the adapter if it is on the device. Otherwise starts to load it when its turn has
        come, and the caller tries again at the next step. Raises AdapterUnavailable if the load
        failed. turn: turn of the waiting sequence, or None if the caller is no sequence and goes
        first."""
        ...

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        """Evicts every idle adapter, so that `ref` can be placed without fragmentation. Returns
        False if no other adapter was idle."""
        ...


class FixedSlot:
    """Slot that permanently belongs to one adapter."""

    def __init__(self, slot: int, max_rank: int) -> None:
        self.slot = slot
        self.max_rank = max_rank
        self.leases = self.num_unpaid_bytes = 0
        self.load_times = LoadTimes()


class FixedAdapters:
    """Simplest `AdapterSource`, in which all adapters are permanently on the device."""

    def __init__(self, max_ranks: Mapping[str, int]) -> None:
        """max_ranks: largest rank of each adapter by digest, in the order of their slots."""
        self._slots = {
            digest: FixedSlot(slot, rank) for slot, (digest, rank) in enumerate(max_ranks.items())
        }

    @property
    def is_busy(self) -> bool:
        return any(slot.leases for slot in self._slots.values())

    def begin_step(self, in_use: Iterable[AdapterUse]) -> bool:
        return True

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        pass

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        pass

    def cancel(self, ref: AdapterRef) -> None:
        pass

    def acquire(
        self, ref: AdapterRef, turn: AdapterTurn | None = None
    ) -> AdapterLease | Loading | NoRoom:
        if (found := self._slots.get(ref.digest)) is None:
            raise AdapterUnavailable("adapter.store.missing", f"no adapter {ref.digest}")
        found.leases += 1
        return AdapterLease(found.slot, found.max_rank, "", 0, found)

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        return False
