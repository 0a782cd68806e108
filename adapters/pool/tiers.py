"""State of one adapter in the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adapters.pool.load_cost import LoadCost
from adapters.pool.packed_image import AdapterImage
from adapters.pool.source import AdapterTier, AdapterUnavailable, LoadTimes
from adapters.reference import AdapterSignature
from memory.accounts import NO_TENANT, Turn
from memory.eviction.adapter_memory import Placement
from memory.eviction.copy_queue import Copy
from memory.reuse import Reuse

AWAITED_STEPS = 2
"""Number of calls of `AdapterPool.begin_step` after which a requested adapter no longer counts as
awaited. Waiting callers request their adapters again in each step."""


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """State of an adapter. `placement` and `slot` are both set or both None. If they are set, the
    adapter is being copied to the device while `loading` is set, and can be leased after that."""

    digest: str
    known: dict[str, AdapterEntry]
    """Entries of the same pool, by digest. `forget` removes this entry from them."""
    far_tier: Callable[[str], AdapterTier]
    """Function from a digest to the tier, disk or store, of an adapter not on host or device."""
    reuse: Reuse
    cost: LoadCost = field(default_factory=LoadCost)
    name: str = ""
    """Adapter's name in the last request that contained a name."""
    is_ephemeral: bool = False
    """Whether the last request was for an ephemeral version, which is retired after some time."""
    signed: AdapterSignature | None = None
    """Signature of the last requested version. The next fetch checks the files against it."""
    account: str = NO_TENANT.name
    """Tenant that last requested the adapter and is charged for its bytes."""
    image: AdapterImage | None = None
    image_bytes: int = 0
    """Size of the image in bytes; 0 until the image has been loaded once."""
    placement: Placement | None = None
    slot: int | None = None
    max_rank: int = 0
    checksum: str = ""
    """Checksum of the last loaded image."""
    proved: str = ""
    """Checksum that an image must have to be used. Empty if none is required."""
    loading: Copy[AdapterImage] | None = None
    turns: dict[str, Turn] = field(default_factory=dict[str, Turn])
    """Turn of each account that requested the adapter since it was last leased."""
    load_times: LoadTimes = field(default_factory=LoadTimes)
    failure: tuple[AdapterUnavailable, float] | None = None
    """Error of the last load, and the time from which the load may be retried."""
    leases: int = 0
    num_unpaid_bytes: int = 0
    """Bytes of the last copy to the device if no lease was charged for them yet, otherwise 0."""
    is_kept: bool = False
    """Whether the adapter is to be pinned. `is_pinned` is set while there is room to pin it."""
    is_pinned: bool = False
    awaited_steps: int = 0
    """Further calls of `begin_step` for which the adapter is awaited (see `AWAITED_STEPS`)."""

    @property
    def is_ready(self) -> bool:
        """Whether the adapter is on the device and can be leased."""
        return self.slot is not None and self.loading is None

    @property
    def is_idle(self) -> bool:
        """Whether the adapter may be evicted from the device."""
        return self.is_ready and not self.leases and not self.is_pinned

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the adapter to be on the device."""
        return self.awaited_steps > 0

    @property
    def is_wrong(self) -> bool:
        """Whether a checksum is required (`proved`) and the loaded image has another one."""
        return self.proved not in ("", self.checksum)

    @property
    def is_proved(self) -> bool:
        """Whether an image is loaded that has the required checksum `proved`."""
        is_here = self.image is not None or self.slot is not None
        return is_here and self.proved != "" and self.proved == self.checksum

    @property
    def needs_copy(self) -> bool:
        """Whether a caller or a pin waits for the image to be copied to the device."""
        return self.slot is None and (self.is_pinned or self.is_awaited)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device if the adapter is there, otherwise on the host; 0 if on neither."""
        if self.placement is not None:
            return self.placement.num_bytes
        return 0 if self.image is None else self.image.num_bytes

    @property
    def tier(self) -> AdapterTier:
        if self.loading is not None:
            return "loading"
        if self.slot is not None:
            return "device"
        return "disk" if self.image is None else "host"

    def device_loss_s(self, now: float) -> float:
        """Returns the cost of an eviction from the device: reload seconds times expected reuse."""
        cost = self.cost.copy_s(self.image_bytes)
        if self.image is None:
            cost += self.cost.fetch_s(self.image_bytes)
        return cost * self.reuse.expected(now)

    def forget(self) -> None:
        """Removes the entry from its pool, unless the adapter is loaded, loading, to be pinned,
        awaited or recently failed. Does nothing if another entry of the same digest has replaced
        this entry."""
        here = self.loading or self.image or self.failure or self.is_kept or self.is_awaited
        if not here and self.slot is None and self.known.get(self.digest) is self:
            del self.known[self.digest]
