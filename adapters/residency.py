"""What the pool keeps about one adapter."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from adapters.errors import AdapterUnavailable
from adapters.image import AdapterImage
from memory.runs import Run

USE_HALF_LIFE_S = 60.0
"""A use this old counts half when adapters compete for memory."""

COPY_BYTES_PER_S = 4e9
FETCH_BYTES_PER_S = 5e8
RELOAD_OVERHEAD_S = 1e-3
"""What bringing an adapter back costs, roughly; only the proportions matter."""

Tier = Literal["store", "disk", "host", "device", "loading"]
"""store: nowhere nearer, known only for the failure of its last load."""


@dataclass(frozen=True, slots=True)
class AdapterResidency:
    """Where an adapter is. num_bytes: on the device, else on the host, else 0. fault: of the last
    load, if it failed."""

    digest: str
    tier: Tier
    num_bytes: int
    leases: int
    pinned: bool
    fault: AdapterUnavailable | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """run and slot: both or none. While `loading` they are being filled, afterwards they serve."""

    digest: str
    image: AdapterImage | None = None
    run: Run | None = None
    slot: int | None = None
    max_rank: int = 0
    checksum: str = ""
    """Of the image that is or was last here."""
    proved: str = ""
    """The checksum that an image must have to serve, if known."""
    loading: Future[AdapterImage] | None = None
    failure: tuple[AdapterUnavailable, float] | None = None
    """The error and the time from which it may be tried again."""
    leases: int = 0
    asked_at_poll: int = -2
    """`poll` count when someone last asked in vain: who waits asks in every step."""
    uses: float = 0.0
    used_at: float = 0.0

    @property
    def is_ready(self) -> bool:
        """On the device, to be leased."""
        return self.slot is not None and self.loading is None

    @property
    def is_wrong(self) -> bool:
        """What is here is not what was proved."""
        return self.proved not in ("", self.checksum)

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

    def note_use(self, now: float) -> None:
        self.uses = self.decayed_uses(now) + 1
        self.used_at = now

    def decayed_uses(self, now: float) -> float:
        """Uses of late, older ones fading by half each half-life: the expected reuse."""
        return self.uses * 2.0 ** ((self.used_at - now) / USE_HALF_LIFE_S)

    def value_per_byte(self, now: float) -> float:
        """What its device bytes save: cost to bring it back times expected reuse, per byte."""
        num_bytes = max(self.num_bytes, 1)
        cost = RELOAD_OVERHEAD_S + num_bytes / COPY_BYTES_PER_S
        if self.image is None:
            cost += num_bytes / FETCH_BYTES_PER_S
        return cost * self.decayed_uses(now) / num_bytes


@dataclass(slots=True)
class AdapterLease:
    """The right to use a slot: while held, the adapter's tables and bytes stay as they are."""

    slot: int
    max_rank: int
    checksum: str
    """Of the image in the slot."""
    _entry: Entry | None

    def release(self) -> None:
        """A second call does nothing."""
        if self._entry is not None:
            self._entry.leases -= 1
            self._entry = None
