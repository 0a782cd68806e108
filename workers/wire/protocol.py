"""The worker's language: every frame that crosses between a gateway and a worker. msgspec only, no
torch.

A frame is a 4-byte big-endian length and one msgpack-encoded message, at most `MAX_FRAME_BYTES`.
Either side's first frame is its `Hello`, and both speak the newest version that both have. A field
that is added has a default, and its version stands in `version_needed` if a peer that does not know
it would answer wrongly. Sequence ids are chosen by the gateway and are unique on
its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

PROTOCOL_VERSION = 7
OLDEST_VERSION = PROTOCOL_VERSION - 1
"""Oldest version of a peer that is let in: gateways and workers of two neighbouring releases serve
together."""
MAX_FRAME_BYTES = 16 << 20
PULSE_PERIOD_S = 0.5
UNSATISFIABLE = "unsatisfiable"
"""The `tier` of a model that the worker, as it is set up, cannot serve; its `error` says why."""
ALL_TOKENS = -1
"""For `SamplingParams.logprobs`: every token of the vocabulary is told."""
MAX_RETRY_S = 60.0
"""No refused client is told to come again later than that."""


class ErrorCode(StrEnum):
    """Why a `Failed` was sent. The gateway alone maps these to HTTP."""

    INVALID = "invalid"
    MODEL_UNKNOWN = "model_unknown"
    MODEL_UNAVAILABLE = "model_unavailable"
    PROMPT_TOO_LONG = "prompt_too_long"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    OVERLOADED = "overloaded"
    EXPIRED = "expired"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    LOGITS_NAN = "logits_nan"
    INTERNAL = "internal"


class ServiceClass(StrEnum):
    """How soon an answer is wanted; each class has a guaranteed share of a worker."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class OutputKind(StrEnum):
    """What a request asks of the model: new tokens, the log-probabilities of its prompt, or a
    vector of its prompt."""

    GENERATE = "generate"
    SCORE = "score"
    EMBED = "embed"


class Pooling(StrEnum):
    """Which of a prompt's last hidden states, after the final norm, its vector is made of."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    """The first token's."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ThoughtBound(msgspec.Struct, frozen=True):
    """How long the thought before an answer may be."""

    max_tokens: int
    """Then its end is the only token that may follow."""
    begin: int
    """The token that begins a thought."""
    end: int
    """The token that ends it."""
    is_begun: bool = False
    """Whether the prompt ends inside the thought."""


class TokenRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which tokens may be generated, whatever their logits."""

    allowed: tuple[int, ...] = ()
    """Only these; empty: any. Not beside a grammar."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences that are not generated, unless nothing else may follow."""
    thought: ThoughtBound | None = None


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
    """Log-probability of each generated token, with this many top alternatives (0 = none), or with
    all tokens (`ALL_TOKENS`)."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: the tokens that are told, in this order, in place of the likeliest."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first; such a request reuses no cached prefix."""
    rules: TokenRules | None = None


class AdapterRef(msgspec.Struct, frozen=True):
    """An immutable adapter version as the data path knows it. `digest` alone identifies it; `name`
    is for people."""

    digest: str
    name: str = ""
    checksum: str = ""
    """SHA-256 (hex) of the packed image in the receiving worker's layout, as proved; empty: not
    proved for this layout yet."""
    is_ephemeral: bool = False
    """Whether the version lives for a while only, so that its packed image is not worth a file."""


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
    weight: int = 1
    """The tenant's weight among those that wait."""
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    """Among the requests of the tenant."""
    timeout_s: float | None = None
    """Time after it was sent from which its first token is not wanted any more."""
    num_resumed: int = 0
    """The last so many of `tokens` are no prompt: they were generated by a worker that was lost.
    They count in all that counts generated tokens, `max_tokens` included."""
    kind: OutputKind = OutputKind.GENERATE
    """`score` generates nothing: `max_tokens` is 0, and `prompt_logprobs` is set. `embed` generates
    nothing either; its vector comes with the end of the sequence."""
    stream_interval: int = 1
    """Tokens per output frame; the first token is always sent alone. A client that waits for the
    whole answer need not hear of each."""
    traceparent: str | None = None
    """W3C trace context of the request, where it is traced: then it is told when the sequence
    passed which stage."""
    grammar: str = ""
    """What the generated text is held to, in llguidance's JSON; empty: nothing."""
    pooling: Pooling = Pooling.LAST
    """For kind `embed`: how the vector is made."""
    labels: tuple[int, ...] = ()
    """For kind `embed` with the pooling `last`: the vector has the logits of these tokens after the
    prompt, in their order, in place of the hidden state."""
    waited_s: float = 0.0
    """Seconds that it has waited at other workers, which count towards the longest wait."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a sequence. Answered by its end: a `SequenceOutput` with the reason `abort`, unless
    another end is on its way already."""

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


class DesiredModel(msgspec.Struct, frozen=True):
    """A base model of the catalog. `is_pinned`: to be resident; `is_unloaded`: not to be."""

    digest: str
    name: str
    is_pinned: bool = False
    is_unloaded: bool = False


class Desired(msgspec.Struct, frozen=True, tag="desired"):
    """All that the catalog of this generation wants kept; older generations than the last are
    ignored."""

    generation: int
    pins: list[Pin]
    models: list[DesiredModel] = []


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new work, finish what runs; `WorkerStatus.draining` tells. Or take it up again."""

    is_on: bool = True


# Worker to gateway


class ModelInfo(msgspec.Struct, frozen=True):
    digest: str
    name: str
    max_model_len: int
    adapter_layout: str = ""
    """Names the layout of packed adapter images for this model here."""
    cache_layout: str = ""
    """Names the layout of KV pages: part of their keys."""


class Models(msgspec.Struct, frozen=True, tag="models"):
    """In place of those of the `Hello`: a model was registered since."""

    models: list[ModelInfo]


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


class AdapterLoadTimes(msgspec.Struct, frozen=True, array_like=True):
    """When an adapter came to the device, in seconds since its sequence arrived at the worker."""

    tier: str
    """Where it came from: host, disk or store."""
    begun_s: float
    """0 if the load had begun before the sequence arrived."""
    ended_s: float
    copy_begun_s: float = 0.0
    """When its copy from the host began; as `begun_s`."""
    num_evicted: int = 0
    """Adapters that left the device for it."""


class SequenceTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a sequence passed the stages of its way through a worker, in seconds since it arrived
    there. Sent of a sequence that has a `traceparent`, with its first output and its end."""

    told_s: float
    """When this was told; of the last output, when the sequence ended."""
    started_s: float | None = None
    """When its first step began to be scheduled; None: it never ran."""
    first_token_s: float | None = None
    """When the first token generated here was there; None: none was."""
    model_wait: tuple[float, float] | None = None
    """When its base model left the device, 0 if that was before the sequence arrived, and when it
    was back; None: the model was there."""
    adapter_load: AdapterLoadTimes | None = None
    """None: the adapter was on the device."""
    preempted_s: list[float] = []
    """When it was preempted: the first few times."""
    num_preemptions: int = 0


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step did for one sequence, or as many as its `stream_interval` has. Each sequence
    ends in one with `finish_reason`, or in a `Failed`."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first generated token (or with the finish, if none is generated)."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache, as in `PromptProgress`; on the first output and
    the last."""
    times: SequenceTimes | None = None
    """On the first output and the last, if the request has a `traceparent`."""
    vector: bytes | None = None
    """The vector of kind `embed`, with the finish: float32, little-endian, not normalised."""


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far the prompt of a sequence has come that has no output yet. Sent after each step that
    took it further, and before the end of a sequence that is aborted or fails.

    A sequence that is preempted begins its prompt again. It is told of again when it gets further
    than it was before.
    """

    id: int
    num_positions: int
    """Prompt positions that are computed or were found in the prefix cache."""
    num_cached: int
    """How many of these, from the first on, were found there when the sequence began, or began
    again and found more than was told of it."""


class StepFrame(msgspec.Struct, frozen=True, omit_defaults=True, tag="step"):
    """Everything one engine step has for this gateway; `progress` comes before `sequences`."""

    sequences: list[SequenceOutput]
    progress: list[PromptProgress] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: int
    code: ErrorCode
    message: str
    retry_after_s: float = 0.0
    """With `overloaded`: when there may be room."""
    pace_s: float = 0.0
    """With `overloaded`, where the queue had no room for any such request of the tenant: how long
    one place takes to come free for it."""
    times: SequenceTimes | None = None
    """When a sequence that was queued passed its stages, if the request has a `traceparent`."""


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
    name: str = ""
    """`name@version`, as a gateway asked for it last; empty: none has."""


class ModelStatus(msgspec.Struct, frozen=True):
    digest: str
    name: str
    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Cached pages without a user; they count neither as free nor as used."""
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_adapter_evictions: int = 0
    """Adapters taken off the device to make room."""
    num_integrity_failures: int = 0
    """Checks of the accounting, made when idle, that failed: a defect of ours."""
    tier: str = "device"
    """device | loading | draining (leaves the device when what runs has ended) | host | cold |
    unsatisfiable"""
    num_bytes: int = 0
    """Bytes of its weights on the device, now or when it was there last; before that as planned."""
    num_swaps: int = 0
    """How often it came to the device."""
    idle_s: float = 0.0
    """Since its last request ended; 0 while it has any."""
    load_s: float = 0.0
    """How long it takes to come to the device, as last measured or as estimated."""
    error: str = ""
    """Why it could not be loaded, until it is."""
    max_num_seqs: int = 0
    """Sequences that may run at a time."""
    num_waiting_tokens: int = 0
    """Prompt tokens that are neither computed nor cached, of what runs and waits."""
    prefill_tokens_per_s: float = 0.0
    """As measured recently, before the first request in the steps of the warm-up; 0: not yet."""
    decode_step_s: float = 0.0
    """Mean length of a step without prefill, of late; 0: not yet."""
    adapter_loads: dict[str, int] = {}
    """Adapters that came to the tiers host and device, from the one below."""
    adapter_load_s: dict[str, float] = {}
    """How long these loads took together."""
    num_failed_adapter_loads: int = 0
    itl: list[tuple[float, int]] = []
    """Times between two tokens of a sequence in the last minute: how many were at most so many
    seconds, and more than the bound before."""


class TenantStatus(msgspec.Struct, frozen=True):
    """What is charged to a tenant on the device."""

    tenant: str
    """Its id; empty: what no tenant asked for."""
    kv_bytes: int
    """Pages that it computed, in use or kept."""
    adapter_bytes: int
    """Adapters that it was the last to ask for."""


def why_unsatisfiable(models: Sequence[ModelStatus]) -> str | None:
    """Returns why none of the models can ever be served, or None if one could or there is none."""
    if not models or any(model.tier != UNSATISFIABLE for model in models):
        return None
    return f"{models[0].name}: {UNSATISFIABLE}: {models[0].error}"


class WorkerStatus(msgspec.Struct, frozen=True, tag="status"):
    """What is, sent every second and after a drain."""

    instance_id: str
    draining: bool
    models: list[ModelStatus]
    adapters: list[AdapterStatus]
    arena_bytes: int
    extents: str
    """One character an extent: '.' free, 'k' KV, 'a' adapters, 'w' weights."""
    settings: dict[str, str]
    step: int
    tokens_per_s: float
    generation: int = 0
    """Generation of the last `Desired` that was applied."""
    tenants: list[TenantStatus] = []
    """Those that hold most of the device's memory."""
    num_late_kernels: int = 0
    """Compiled, or read from the cache, after the worker was ready: in steps of requests."""
    num_cached_adapters: int = 0
    """Images in the disk cache, of adapters that are nearer too."""
    cached_adapter_bytes: int = 0


class CachedPages(msgspec.Struct, frozen=True, tag="cached"):
    """Pages that came into the prefix cache of a model and left it: the first 8 bytes of each key
    (`memory.page_key`), one after the other. `is_whole`: all that are there, forget the rest."""

    model: str
    added: bytes
    removed: bytes = b""
    is_whole: bool = False


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Sent every `PULSE_PERIOD_S` by the loop that also carries all other frames: a worker that
    sends nothing is stopped, stuck or cut off."""

    step_age_s: float = 0.0
    """How long the engine has been at what it does; 0: it waits for work."""
    num_received: int = 0
    """Frames of this gateway, its Hello included: one that sent more is not heard."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    """The oldest that this side speaks."""
    instance_id: str
    models: list[ModelInfo] = []
    newest: int = 0
    """The newest that this side speaks; 0: `version` alone."""


def own_hello(instance_id: str, models: list[ModelInfo] | None = None) -> Hello:
    """What a side of this version says first."""
    return Hello(OLDEST_VERSION, instance_id, models or [], PROTOCOL_VERSION)


def common_version(own: Hello, peer: Hello) -> int | None:
    """The newest version that both sides speak; None if there is none."""
    newest = min(max(own.version, own.newest), max(peer.version, peer.newest))
    return newest if newest >= max(own.version, peer.version) else None


def version_needed(logprobs: int | None, logprob_token_ids: tuple[int, ...]) -> int:
    """Returns the oldest version whose workers answer a `Generate` with such log-probabilities as
    it is meant: 6 tells the likeliest tokens alone, and not all of them."""
    return 7 if logprob_token_ids or logprobs == ALL_TOKENS else OLDEST_VERSION


ToWorker = Hello | Generate | Abort | Prefetch | Probe | Desired | Drain
ToGateway = Hello | Models | Pulse | StepFrame | Failed | ProbeResult | WorkerStatus | CachedPages
