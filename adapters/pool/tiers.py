"""What the pool keeps about one adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from adapters.errors import AdapterUnavailable
from adapters.pool.image import AdapterImage
from adapters.pool.load_cost import build_s, copy_s, fetch_s
from memory.accounts import NO_TENANT
from memory.allocations import Allocation
from memory.copy_queue import Copy
from memory.reuse import Reuse

SHADOW = 0.1
"""What a host image is worth while the device has the adapter too: it only makes it quicker to
bring back, should it ever have to leave."""

Tier = Literal["store", "disk", "host", "device", "loading"]
"""store: nowhere nearer, known only for the failure of its last load."""


class AdapterResidency(msgspec.Struct, frozen=True):
    """Where an adapter is. num_bytes: on the device, else on the host, else 0. fault: of the last
    load, if it failed."""

    digest: str
    tier: Tier
    num_bytes: int
    leases: int
    pinned: bool
    fault: AdapterUnavailable | None = None
    name: str = ""
    """By which it was asked for last; empty if by none."""


class Holder(Protocol):
    """The pool of an entry, as others see it that it shares the host with."""

    def host_worth(self, entry: AdapterEntry) -> tuple[bool, float]:
        """Whether a caller waits for the image to go on to the device; then seconds that its loss
        costs."""
        ...

    def forget(self, entry: AdapterEntry) -> None:
        """If nothing is left of it but its file."""
        ...


class Load(NamedTuple):
    """An adapter's way to the device, in seconds of the pool's clock."""

    tier: Tier
    """Where it came from."""
    begun_s: float
    ended_s: float
    copy_begun_s: float
    """When its copy to the device began."""
    num_evicted: int
    """Adapters that left the device for it."""


@dataclass(slots=True)
class LoadTimes:
    """When an adapter last came nearer, in seconds of the pool's clock."""

    source: Tier = "host"
    """Where it was last fetched from: disk or store."""
    fetch_begun_s: float = -math.inf
    fetched_s: float = -math.inf
    copy_begun_s: float = -math.inf
    copied_s: float = -math.inf
    num_evicted: int = 0
    """Adapters that left the device for it."""

    def since(self, arrival_s: float) -> Load | None:
        """Its way to the device from where it was at that time. None: it was there."""
        if self.copied_s <= arrival_s:
            return None
        tier, begun_s = "host", self.copy_begun_s
        if self.fetched_s > arrival_s:
            tier, begun_s = self.source, self.fetch_begun_s
        return Load(tier, begun_s, self.copied_s, self.copy_begun_s, self.num_evicted)


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """run and slot: both or none. While `loading` they are being filled, afterwards they serve."""

    digest: str
    holder: Holder
    reuse: Reuse = field(default_factory=Reuse)
    """Requests for it."""
    name: str = ""
    """For people, as the last request had it."""
    is_ephemeral: bool = False
    """Whether the last request asked for it as an ephemeral version."""
    account: str = NO_TENANT.name
    """The tenant that asked for it last: its bytes are charged to it."""
    image: AdapterImage | None = None
    image_bytes: int = 0
    """Size of its image, once one was here."""
    run: Allocation | None = None
    slot: int | None = None
    max_rank: int = 0
    checksum: str = ""
    """Checksum of the image that is or was last here."""
    proved: str = ""
    """The checksum that an image must have to serve, if known."""
    loading: Copy[AdapterImage] | None = None
    load_times: LoadTimes = field(default_factory=LoadTimes)
    failure: tuple[AdapterUnavailable, float] | None = None
    """The error and the time from which it may be tried again."""
    leases: int = 0
    num_unpaid_bytes: int = 0
    """Copied to the device, and not leased since."""
    is_pinned: bool = False
    """To be on the device and to stay there."""
    asked_at_poll: int = -2
    """`poll` count when it was last asked for in vain: a waiting sequence asks in every step."""

    @property
    def is_ready(self) -> bool:
        """On the device, to be leased."""
        return self.slot is not None and self.loading is None

    @property
    def is_wrong(self) -> bool:
        """What is here is not what was proved."""
        return self.proved not in ("", self.checksum)

    @property
    def is_proved(self) -> bool:
        """What is here is what was proved."""
        is_here = self.image is not None or self.slot is not None
        return is_here and self.proved != "" and self.proved == self.checksum

    @property
    def is_empty(self) -> bool:
        """Nothing is left of it but its file."""
        here = self.loading or self.image or self.failure or self.is_pinned
        return not here and self.slot is None

    @property
    def num_bytes(self) -> int:
        if self.run is not None:
            return self.run.num_bytes
        return 0 if self.image is None else self.image.num_bytes

    @property
    def tier(self) -> Tier:
        if self.loading is not None:
            return "loading"
        if self.slot is not None:
            return "device"
        return "disk" if self.image is None else "host"

    def device_loss_s(self, now: float) -> float:
        """Seconds that giving up its run costs: to load it again, times its expected reuse."""
        cost = copy_s(self.image_bytes)
        if self.image is None:
            cost += fetch_s(self.image_bytes)
        return cost * self.reuse.expected(now)

    def host_loss_s(self, now: float, *, is_cached: bool) -> float:
        """The same of its image on the host. is_cached: on disk too."""
        cost = fetch_s(self.image_bytes)
        if not is_cached:
            cost += build_s(self.image_bytes)
        return cost * self.reuse.expected(now) * (1.0 if self.slot is None else SHADOW)


@dataclass(slots=True)
class AdapterLease:
    """The right to use a slot: while held, the adapter's tables and bytes stay as they are."""

    slot: int
    max_rank: int
    checksum: str
    """Checksum of the image in the slot."""
    num_loaded_bytes: int
    """Copied to the device for the holder of this lease."""
    _entry: AdapterEntry | None

    def load_since(self, arrival_s: float) -> Load | None:
        """As `LoadTimes.since`, while it is held."""
        return self._entry and self._entry.load_times.since(arrival_s)

    def release(self) -> None:
        """A second call does nothing."""
        if self._entry is not None:
            self._entry.leases -= 1
            self._entry = None
