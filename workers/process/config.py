"""Settings of a worker, as one frozen struct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from telemetry.logs import LogFormat, LogLevel
from workers.wire.transport.base import Security

DType = Literal["bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker. Sizes are in bytes. `models` maps served names to digests in the store.
    `workers.process.machine` fills in settings that depend on the machine."""

    models: dict[str, str]
    store: str
    """Store of models and adapters: a folder, or a bucket's location."""
    cache_dir: Path
    listen: str
    """Address for gateways: `unix:PATH` or `tcp://HOST:PORT`."""
    security: Security = Security()
    health: str = "127.0.0.1:0"
    """Address of /livez, /readyz and /metrics: HOST:PORT or `unix:PATH`."""
    device: Device = "cpu"
    """Device that runs the models. `auto` selects a GPU if one can be used, otherwise the CPU."""
    ops: str = ""
    """Name of the op backend. If empty, the device determines the backend."""
    kernel_variant: str = ""
    """Variant of the `cpu` backend's kernels (see `ops.processor`). Empty means the fastest one."""
    kernel_fault: str = ""
    """Reason why the `amx` kernels are not used although the processor has AMX. Set at start-up."""
    dtype: DType = "bfloat16"
    threads: int | None = None
    memory: int = 0
    """Bytes for KV pages and resident adapters, in addition to the weights of all models. If 0, a
    CPU worker uses 1 GiB or a quarter of the RAM, whichever is less, and a GPU worker uses
    `device_memory`, or most of the free memory if `device_memory` is not set either."""
    device_memory: int | None = None
    """Bytes of device memory for weights, KV pages and adapters together. If set, `memory` is not
    used. Models that do not fit at the same time are loaded in turn."""
    max_model_wait_s: float = 30.0
    """Seconds that a request waits for its model before a busy model is unloaded for it, even if
    the busy model was loaded only recently."""
    max_model_drain_s: float = 10.0
    """Seconds that running sequences may continue when their model is to be unloaded. After that,
    the sequences are preempted until the model is loaded again."""
    adapter_memory_min: int = 0
    adapter_memory_max: int | None = None
    host_adapter_memory: int = 1 << 30
    host_model_memory: int | None = None
    """Maximum bytes of packed weights that a GPU worker keeps on the host. None means no limit."""
    adapter_cache: int = 16 << 30
    """Maximum bytes of packed adapters on local disk."""
    max_num_seqs: int = 64
    max_batched_tokens: int = 0
    """Maximum number of tokens per step. 0 means 512 on a CPU and 2048 on a GPU."""
    max_token_gap: float = 0.25
    """Maximum seconds of a step in which sequences generate tokens. Limits the prompt tokens that
    such a step also computes. Multiplied by the `gap_factor` of each sequence's service class."""
    max_gap_ratio: float = 1.8
    """Maximum of the seconds of such a step, relative to its seconds without prompts."""
    max_model_len: int | None = None
    max_lora_rank: int = 256
    """Maximum rank for which kernels are compiled at start-up. Kernels for a higher rank are
    compiled in the step that first needs them."""
    max_queued: int = 1024
    max_queued_tokens: int = 1 << 20
    max_queue_wait: float = 15.0
    """Maximum seconds until the first token of an interactive request. Together with `max_queued`
    and `max_queued_tokens`, it decides which requests a model's queue refuses (`QueueBounds`)."""
    max_loaded_adapters: int = 128
    """Maximum number of adapters that are on the device at the same time. Each takes one slot of
    the device tables. Memory for the adapters is limited separately."""
    drain_s: float = 120.0
    """Seconds that running requests have to finish after SIGTERM."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    @classmethod
    def read(cls, path: Path) -> WorkerConfig:
        """Reads a JSON file. Raises msgspec.ValidationError, which names the field."""
        return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=_decode)

    def to_json(self) -> str:
        """Returns the JSON that `read` reads."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    def effective(self) -> dict[str, str]:
        """Returns every setting as text. A value of None becomes an empty string, and a value that
        is not a string becomes JSON. No setting is secret."""
        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return {
            name: value if isinstance(value, str) else "" if value is None else json.dumps(value)
            for name, value in values.items()
        }


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
