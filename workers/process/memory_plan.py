"""Computes the division of a worker's memory into extents, without allocating the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe

PAGES_PER_EXTENT = 8
DEFAULT_PAGE_BYTES = 1 << 20
"""Page size in bytes that is assumed if no model is known at the start. It is the page size of
large models, so that the pages of a model that is added later fit into the extents."""
MAX_EXTENTS = 1024
"""Maximum number of extents. More extents would make every transfer of memory slower."""


class Footprint(NamedTuple):
    """Bytes of one KV page of a model, and bytes of the model's weights."""

    page_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of memory into extents.

    - num_extents: number of extents of the arena.
    - max_kv_extents: maximum number of KV extents of one model.
    - num_weight_extents: number of extents for the weights of all models known at the start.
    """

    extent_bytes: int
    num_extents: int
    adapter_ceiling_bytes: int
    max_kv_extents: int
    num_weight_extents: int


def plan_memory(
    config: WorkerConfig, models: Sequence[Footprint], *, granularity: int, buffer_bytes: int = 0
) -> MemoryPlan:
    """Returns the division of memory for a worker that serves these models. If `device_memory` is
    not set, the worker has `memory` bytes in addition to the weights of all models. Raises
    CannotServe if there is too little memory.

    granularity: number of bytes of which the size of an extent must be a multiple. buffer_bytes:
    bytes of `device_memory` for the models' buffers and tables, which are outside the arena.
    """
    outside = buffer_bytes if config.device_memory is not None else 0
    given = (config.device_memory or config.memory) - outside
    extent_bytes, least = _cut(given, config, models, granularity)
    if given < least:
        # The extents of a larger memory may be larger, which may raise the minimum again.
        while (larger := _cut(least, config, models, granularity)[1]) > least:
            least = larger
        raise CannotServe(
            f"{setting(config)}: {given + outside} bytes are too few for what this worker serves;"
            f" the least is {least + outside}"
        )
    weights = [-(-model.weight_bytes // extent_bytes) for model in models]
    if config.device_memory is None:
        num_shared = config.memory // extent_bytes
        num_extents = num_shared + sum(weights)
    else:
        num_extents = given // extent_bytes
        num_shared = num_extents - min(weights, default=0)
    ceiling = config.adapter_memory_max
    return MemoryPlan(
        extent_bytes,
        num_extents,
        adapter_ceiling_bytes=num_shared * extent_bytes if ceiling is None else ceiling,
        max_kv_extents=num_shared - -(-config.adapter_memory_min // extent_bytes),
        num_weight_extents=sum(weights),
    )


def setting(config: WorkerConfig) -> str:
    """Returns the name of the setting that determines the memory: `memory` or `device_memory`."""
    return "memory" if config.device_memory is None else "device_memory"


def _cut(
    given: int, config: WorkerConfig, models: Sequence[Footprint], granularity: int
) -> tuple[int, int]:
    """Returns the bytes of an extent, and the bytes that must be given at least: for
    `adapter_memory_min`, one extent for KV and, if `device_memory` is set, the weights of the
    largest model. given: bytes of the setting `device_memory`, or of `memory` if it is not set."""
    is_all = config.device_memory is not None
    total = given if is_all else given + sum(model.weight_bytes for model in models)
    page_bytes = max((model.page_bytes for model in models), default=DEFAULT_PAGE_BYTES)
    wanted = max(PAGES_PER_EXTENT * page_bytes, total // MAX_EXTENTS)
    extent_bytes = -(-wanted // granularity) * granularity
    floor = -(-config.adapter_memory_min // extent_bytes)
    largest = max((model.weight_bytes for model in models), default=0) if is_all else 0
    return extent_bytes, (floor + 1 + -(-largest // extent_bytes)) * extent_bytes
