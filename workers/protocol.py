"""The worker's language: every frame that crosses between a gateway and a worker. msgspec only, no
torch.

A frame is a 4-byte big-endian length and one msgpack-encoded message, at most `MAX_FRAME_BYTES`.
Either side's first frame is its `Hello`. Sequence ids are chosen by the gateway and are unique on
its connection.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 << 20


class ErrorCode(StrEnum):
    """Why a `Failed` was sent. The gateway alone maps these to HTTP."""

    INVALID = "invalid"
    MODEL_UNKNOWN = "model_unknown"
    PROMPT_TOO_LONG = "prompt_too_long"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    INTERNAL = "internal"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to continue one sequence. Ranges are the gateway's to check; the worker refuses what it
    cannot do."""

    max_tokens: int
    seed: int
    """Signed 64-bit; always set (the gateway draws one if the caller did not)."""
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """Log-probability of each generated token, with this many top alternatives (0 = none)."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first; such a request reuses no cached prefix."""


class AdapterRef(msgspec.Struct, frozen=True):
    """An immutable adapter version as the data path knows it. `digest` alone identifies it; `name`
    is for people."""

    digest: str
    name: str = ""
    checksum: str = ""
    """SHA-256 (hex) of the packed image in the receiving worker's layout, as proved; empty: not
    proved for this layout yet."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float
    top: list[tuple[int, float]]


# Gateway to worker


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    id: int
    request_id: str
    model: str
    """Digest of the base model."""
    tokens: list[int]
    params: SamplingParams
    cache_domain: str
    """Tenant or sharing group: prefixes are reused only inside one."""
    adapter: AdapterRef | None = None
    activation: int = 0
    """Position from which the adapter acts; before it the base model alone (activated LoRA)."""
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    traceparent: str | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    id: int


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Start to bring an adapter nearer; no answer."""

    model: str
    adapter: AdapterRef


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Prove that the adapter does what its files say; answered by one `ProbeResult`. Ids as for
    sequences, but counted apart."""

    id: int
    model: str
    adapter: AdapterRef


class Pin(msgspec.Struct, frozen=True):
    model: str
    adapter: AdapterRef


class Desired(msgspec.Struct, frozen=True, tag="desired"):
    """All that the catalog of this generation wants kept; older generations than the last are
    ignored."""

    generation: int
    pins: list[Pin]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new work, finish what runs; `WorkerStatus.draining` tells."""


# Worker to gateway


class ModelInfo(msgspec.Struct, frozen=True):
    digest: str
    name: str
    max_model_len: int
    adapter_layout: str = ""
    """Names the layout of packed adapter images for this model here."""


class Fingerprint(msgspec.Struct, frozen=True):
    """What the model answers to the probe prompt with the adapter: the likeliest next tokens."""

    tokens: list[int]
    logprobs: list[float]
    effect: float
    """Largest change of a log-probability of the probe that the adapter makes."""


class ProbeResult(msgspec.Struct, frozen=True, tag="probed"):
    """`error` empty: proved. Otherwise an error code, and `message` says what differed; with
    `is_final` false nothing is wrong with the adapter and another try may succeed."""

    id: int
    layout: str = ""
    checksum: str = ""
    fingerprint: Fingerprint | None = None
    error: str = ""
    message: str = ""
    is_final: bool = True


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step did for one sequence. Each sequence ends in one with `finish_reason`, or in a
    `Failed`."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first generated token (or with the finish, if none is generated)."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; on the first output and the last."""


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """Everything one engine step has for this gateway."""

    sequences: list[SequenceOutput]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: int
    code: ErrorCode
    message: str


class AdapterStatus(msgspec.Struct, frozen=True):
    digest: str
    tier: str
    """host | device | loading; disk or store: nowhere nearer, known for its `error` only"""
    num_bytes: int
    leases: int
    pinned: bool
    error: str = ""
    """Code of the failure of its last load, until one succeeds."""
    message: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    digest: str
    name: str
    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Cached pages nobody uses; they count neither as free nor as used."""
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_adapter_evictions: int = 0
    """Adapters taken off the device to make room."""
    num_integrity_failures: int = 0
    """Checks of the accounting, made when idle, that failed: a defect of ours."""


class WorkerStatus(msgspec.Struct, frozen=True, tag="status"):
    """What is, sent every second and after a drain."""

    instance_id: str
    draining: bool
    models: list[ModelStatus]
    adapters: list[AdapterStatus]
    arena_bytes: int
    extents: str
    """One character an extent: '.' free, 'k' KV, 'a' adapters."""
    settings: dict[str, str]
    step: int
    tokens_per_s: float
    generation: int = 0
    """Of the last `Desired` that was applied."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    instance_id: str
    models: list[ModelInfo] = []


ToWorker = Hello | Generate | Abort | Prefetch | Probe | Desired | Drain
ToGateway = Hello | StepOutput | Failed | ProbeResult | WorkerStatus
