"""A worker's settings, one frozen struct."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from workers.process.logs import LogFormat, LogLevel
from workers.wire.transport.base import Security

DType = Literal["bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes. `models` maps served names to digests in the store. What is left to the
    machine is filled in by `workers.process.machine`."""

    models: dict[str, str]
    store: str
    """A folder, or s3://BUCKET/PREFIX."""
    cache_dir: Path
    listen: str
    """`unix:PATH` or `tcp://HOST:PORT`."""
    security: Security = Security()
    """How TCP is secured."""
    health: str = "127.0.0.1:0"
    """HOST:PORT or `unix:PATH` of /livez, /readyz and /metrics."""
    device: Device = "cpu"
    """auto: a GPU where there is one."""
    ops: str = ""
    """Empty: that of the device."""
    kernel_variant: str = ""
    """Variant of the `cpu` backend's kernels, see `ops.processor`. Empty: the fastest one."""
    dtype: DType = "bfloat16"
    threads: int | None = None
    memory: int = 0
    """KV pages and resident adapters, beside the weights of all models, whenever they come. 0:
    on a GPU `device_memory` is most of what is free, on a CPU 1 GiB or a quarter of the RAM."""
    device_memory: int | None = None
    """In place of `memory`: all of it, weights included. If not all models fit they take turns."""
    max_model_wait_s: float = 30.0
    """When a request has waited so long for its model, a busy one makes room."""
    max_model_drain_s: float = 10.0
    """How long running sequences may go on when their model is to leave; then they wait for it."""
    adapter_memory_min: int = 0
    adapter_memory_max: int | None = None
    host_adapter_memory: int = 1 << 30
    host_model_memory: int | None = None
    """Packed weights that are kept on the host while their models are not on the device; None: all.
    Where `keeps_weights`, or on a GPU."""
    adapter_cache: int = 16 << 30
    """Packed adapters on local disk."""
    max_num_seqs: int = 64
    max_batched_tokens: int = 0
    """Tokens of a step. 0: 512 on a CPU, 2048 on a GPU."""
    max_token_gap: float = 0.25
    """Seconds that a step may take at most while streams run, prompts beside them included."""
    runs_ahead: bool | None = None
    """A step is scheduled while the one before it is computed."""
    uses_graphs: bool | None = None
    """Steps in which all sequences generate run as captured graphs. None, for this and
    `runs_ahead`: where the device computes beside the host."""
    keeps_weights: bool = False
    """Packed weights stay on the host too, one image a model, and come from there to addresses that
    they have each time. On a GPU always."""
    max_model_len: int | None = None
    max_lora_rank: int = 256
    """Kernels are compiled at the start for adapters up to this rank; those of a higher one in the
    step that first needs them."""
    max_queued: int = 1024
    max_queued_tokens: int = 1 << 20
    max_queue_wait: float = 15.0
    """Bounds of a model's queue: `QueueBounds`."""
    max_loaded_adapters: int = 128
    """Adapter slots: entries of the device tables, not memory."""
    drain_s: float = 120.0
    """Seconds that running requests have to end after SIGTERM."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    @classmethod
    def read(cls, path: Path) -> WorkerConfig:
        """From a JSON file. Raises msgspec.ValidationError, which names the field."""
        return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=_decode)

    def to_json(self) -> str:
        """What `read` reads."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    def effective(self) -> dict[str, str]:
        """Every setting as text, for people; there are no secrets among them."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
