"""Adapters as the scheduler sees them: leases on slots of the device, and why there is none yet. No
tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from adapters.errors import AdapterUnavailable
from memory.accounts import NO_TENANT, Tenant

Tier = Literal["store", "disk", "host", "device", "loading"]
"""store: in no nearer tier, known only for the failure of its last load."""


class Signed(Protocol):
    """Signature of a content, and the ed25519 key that made it."""

    @property
    def public_key(self) -> bytes: ...

    @property
    def signature(self) -> bytes: ...


class AdapterRef(Protocol):
    """Immutable adapter version."""

    @property
    def digest(self) -> str: ...

    @property
    def name(self) -> str:
        """Human-readable name; empty if unknown."""
        ...

    @property
    def checksum(self) -> str:
        """Checksum of the packed image, as proved; empty if unknown."""
        ...

    @property
    def is_ephemeral(self) -> bool:
        """Whether the version is temporary, so that its image is not cached as a file."""
        ...

    @property
    def signed(self) -> Signed | None: ...


class Load(NamedTuple):
    """Load of an adapter to the device. Times in seconds of the source's clock."""

    tier: Tier
    """Tier that it was loaded from."""
    begun_s: float
    ended_s: float
    copy_begun_s: float
    num_evicted: int
    """Number of adapters evicted from the device for it."""


@dataclass(slots=True)
class LoadTimes:
    """Times of an adapter's last loads, in seconds of the source's clock."""

    source: Tier = "host"
    """Tier of the last fetch: disk or store."""
    fetch_begun_s: float = -math.inf
    fetched_s: float = -math.inf
    copy_begun_s: float = -math.inf
    copied_s: float = -math.inf
    num_evicted: int = 0

    def since(self, arrival_s: float) -> Load | None:
        """Returns the load that brought the adapter to the device after `arrival_s`, from the tier
        where it was then, or None if it was on the device."""
        if self.copied_s <= arrival_s:
            return None
        tier, begun_s = "host", self.copy_begun_s
        if self.fetched_s > arrival_s:
            tier, begun_s = self.source, self.fetch_begun_s
        return Load(tier, begun_s, self.copied_s, self.copy_begun_s, self.num_evicted)


class Leased(Protocol):
    """Adapter on the device, as a lease sees it."""

    leases: int
    load_times: LoadTimes


@dataclass(slots=True)
class AdapterLease:
    """Right to use a slot. While it is held, the adapter's tables and bytes do not change."""

    slot: int
    max_rank: int
    checksum: str
    num_loaded_bytes: int
    """Bytes copied to the device for the holder of this lease."""
    _adapter: Leased | None

    def load_since(self, arrival_s: float) -> Load | None:
        """Returns `LoadTimes.since` of the adapter, or None if the lease was released."""
        return None if self._adapter is None else self._adapter.load_times.since(arrival_s)

    def release(self) -> None:
        """Releases the lease. May be called twice."""
        if self._adapter is not None:
            self._adapter.leases -= 1
            self._adapter = None


@dataclass(frozen=True, slots=True)
class Loading:
    """The adapter is loading. Request it again at the next step."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The adapter is not loading, because too little can be evicted for it."""

    num_bytes: int
    """Bytes that it needs on the device; 0 if there is no room on the host."""


class AdapterSource(Protocol):
    """Source of leases on the adapters of one base model. Methods are called with the memory lock
    held, and never wait for a load."""

    @property
    def is_loading(self) -> bool:
        """Whether any adapter is loading."""
        ...

    @property
    def is_leased(self) -> bool:
        """Whether any adapter is leased."""
        ...

    def poll(self) -> None:
        """Called at the start of each step."""
        ...

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the host for a queued request of the tenant."""
        ...

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        """Starts to load the adapter to the device. An `acquire` will follow at the next step."""
        ...

    def cancel(self, ref: AdapterRef) -> None:
        """Cancels a load that has not started, because no sequence needs the adapter any longer."""
        ...

    def acquire(
        self, ref: AdapterRef, tenant: Tenant = NO_TENANT
    ) -> AdapterLease | Loading | NoRoom:
        """Leases the adapter if it is on the device. Otherwise starts its load; call again at the
        next step. Raises AdapterUnavailable if the load failed."""
        ...

    def is_ready(self, ref: AdapterRef) -> bool:
        """Whether `acquire` need not load the adapter."""
        ...

    def num_missing_bytes(self, ref: AdapterRef) -> int:
        """Returns the bytes that an adapter on the host alone needs on the device, else 0."""
        ...

    def may_displace(self, ref: AdapterRef, other: str) -> bool:
        """Whether adapter `other` (a digest) would be evicted for `ref` once it is idle."""
        ...

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        """Evicts every idle adapter, so that `ref` can be placed without fragmentation. Returns
        False if that frees nothing."""
        ...


class FixedSlot:
    """Slot that an adapter keeps."""

    def __init__(self, slot: int, max_rank: int) -> None:
        self.slot = slot
        self.max_rank = max_rank
        self.leases = 0
        self.load_times = LoadTimes()


class FixedAdapters:
    """Simplest `AdapterSource`: all adapters are on the device, and stay there."""

    is_loading = False

    def __init__(self, max_ranks: Mapping[str, int]) -> None:
        """max_ranks: largest rank of each adapter by digest, in the order of their slots."""
        self._slots = {
            digest: FixedSlot(slot, rank) for slot, (digest, rank) in enumerate(max_ranks.items())
        }

    @property
    def is_leased(self) -> bool:
        return any(slot.leases for slot in self._slots.values())

    def poll(self) -> None:
        pass

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        pass

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        pass

    def cancel(self, ref: AdapterRef) -> None:
        pass

    def acquire(
        self, ref: AdapterRef, tenant: Tenant = NO_TENANT
    ) -> AdapterLease | Loading | NoRoom:
        if (found := self._slots.get(ref.digest)) is None:
            raise AdapterUnavailable("adapter.store.missing", f"no adapter {ref.digest}")
        found.leases += 1
        return AdapterLease(found.slot, found.max_rank, "", 0, found)

    def is_ready(self, ref: AdapterRef) -> bool:
        return ref.digest in self._slots

    def num_missing_bytes(self, ref: AdapterRef) -> int:
        return 0

    def may_displace(self, ref: AdapterRef, other: str) -> bool:
        return False

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        return False
