"""Memory of a worker's device, divided among weights, KV pages and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from memory.arena import Arena
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from workers.device.device_memory import DeviceMemory, HostMemory, MappedMemory, gib
from workers.device.virtual_memory import VirtualMemory
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe, CannotServeModel
from workers.process.memory_plan import Footprint, plan_memory, setting


class WorkerMemory:
    """Memory that all models of a worker share.

    - arena: records the owner of each extent.
    - device: owns the memory of the extents.
    - adapters: allocates memory for adapters in the arena.
    - broker: evicts idle pages and adapters.
    """

    def __init__(
        self,
        config: WorkerConfig,
        models: Sequence[Footprint],
        virtual: VirtualMemory | None,
        buffer_bytes: int,
    ) -> None:
        """models: sizes of the models that are known at the start. virtual: virtual memory of the
        device, or None if weights are ordinary allocations. buffer_bytes: bytes of the
        models' buffers and tables. Raises CannotServe."""
        granularity = UNIT_BYTES if virtual is None else max(UNIT_BYTES, virtual.granularity)
        plan = plan_memory(config, models, granularity=granularity, buffer_bytes=buffer_bytes)
        try:
            self.arena = Arena(
                plan.num_extents * plan.extent_bytes,
                plan.extent_bytes,
                first_byte=plan.extent_bytes,
                adapter_floor_bytes=config.adapter_memory_min,
                adapter_ceiling_bytes=plan.adapter_ceiling_bytes,
            )
        except ValueError as error:
            raise CannotServe(f"adapter_memory: {error}") from error
        sizes = (self.arena.num_extents, self.arena.extent_bytes)
        try:
            self.device: DeviceMemory = (
                HostMemory(*sizes) if virtual is None else MappedMemory(virtual, *sizes)
            )
        except (OSError, OverflowError) as error:
            raise CannotServe(
                f"{setting(config)}: this machine gives no {self.arena.num_bytes} bytes: {error}"
            ) from error
        self.adapters = AdapterMemory(self.arena)
        self.broker = MemoryBroker(self.arena, self.adapters)
        self._plan = plan
        self._limit = config.device_memory

    def max_kv_extents(self, num_extents: int, page_bytes: int) -> int:
        """Returns the maximum number of KV extents of a model. num_extents: number of extents of
        the model's weights. page_bytes: bytes of one KV page of the model. Raises CannotServeModel
        if the model does not fit."""
        extent_bytes = self.arena.extent_bytes
        if page_bytes > extent_bytes:
            raise CannotServeModel(
                f"its KV pages of {gib(page_bytes)} are larger than the worker's extents of"
                f" {gib(extent_bytes)}, which are cut at the start"
            )
        if self._limit is None:
            return self._plan.max_kv_extents
        most = min(self._plan.max_kv_extents, self.arena.num_kv_extents - num_extents)
        if most < 1:
            needed = (num_extents + self.arena.adapter_floor + 1) * extent_bytes
            raise CannotServeModel(
                f"needs {gib(needed)}, the worker's device_memory is {gib(self._limit)}"
            )
        return most

    def extend(self, num_weight_extents: int) -> None:
        """Enlarges the memory for weights, which is separate from the bytes of `memory`,
        to `num_weight_extents` extents. Does nothing if it is already that large, or if
        `device_memory` is set. Raises CannotServeModel if the machine has too little memory."""
        if self._limit is not None:
            return
        with self.broker.lock:
            missing = num_weight_extents - self._plan.num_weight_extents - self.arena.num_beside
        if missing <= 0:
            return
        try:
            self.device.extend(missing)
        except MemoryError as error:
            needed = gib(missing * self.arena.extent_bytes)
            raise CannotServeModel(f"needs {needed} more beside `memory`, {error}") from error
        with self.broker.lock:
            self.arena.extend(missing)
