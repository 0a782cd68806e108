"""Allocates extents of the device's memory to the weights of base models."""

from __future__ import annotations

from memory.arena import Arena
from memory.eviction.broker import MemoryBroker
from workers.device.device_memory import DeviceMemory


class WeightMemory:
    """Extents that the weights of all models own, and the memory of these extents. Used on the
    engine thread. Callers must not hold the memory lock, because the methods make driver calls,
    during which no thread may hold this lock."""

    def __init__(self, arena: Arena, broker: MemoryBroker, device: DeviceMemory) -> None:
        self._arena = arena
        self._broker = broker
        self._device = device

    @property
    def capacity(self) -> int:
        """Maximum number of extents that weights and KV pages together can use."""
        return self._arena.num_kv_extents + self._arena.num_beside

    def allocate(self, owner: str, num_extents: int) -> bool:
        """Allocates extents until the owner has `num_extents`, evicting idle KV pages and adapters.
        Returns False if too few extents could be allocated. The owner then keeps the extents that
        it has, and a later call may allocate the rest."""
        with self._broker.lock:
            before = self._arena.weight_extents(owner)
            missing = num_extents - self._arena.num_weight_extents(owner)
            is_enough = self._broker.allocate_weights(owner, missing) == missing
            new = self._arena.weight_extents(owner) - before
        for extent in sorted(new):
            self._device.lend(extent)
        return is_enough

    def free(self, owner: str) -> None:
        """Frees all extents of the owner. The owner's weights must no longer be on the device."""
        for extent in sorted(self._arena.weight_extents(owner)):
            self._device.restore(extent)
        with self._broker.lock:
            self._arena.free_weights(owner)
