"""Protocol between gateways and workers: every frame that they exchange. msgspec only, no torch.

A frame is a 4-byte big-endian length and one msgpack-encoded message, at most `MAX_FRAME_BYTES`.
Either side's first frame is its `Hello`, and both use the newest version that both support. A field
that is added has a default, and its version is in `version_needed` if a peer without it would
answer wrongly. Sequence ids are chosen by the gateway and are unique on its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

PROTOCOL_VERSION = 7
OLDEST_VERSION = PROTOCOL_VERSION - 1
"""Oldest supported version of a peer: that of the previous release."""
MAX_FRAME_BYTES = 16 << 20
PULSE_PERIOD_S = 0.5
UNSATISFIABLE = "unsatisfiable"
"""`tier` of a model that this worker's configuration cannot serve. Its `error` says why."""
ALL_TOKENS = -1
"""Value of `SamplingParams.logprobs` that requests every token of the vocabulary."""
MAX_RETRY_S = 60.0
"""Maximum seconds after which a refused client is told to retry."""


class ErrorCode(StrEnum):
    """Reasons of a `Failed`. Only the gateway maps them to HTTP."""

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
    """Urgency of a request. Each class has a guaranteed share of a worker."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class OutputKind(StrEnum):
    """Kind of result: new tokens, log-probabilities of the prompt, or a vector of the prompt."""

    GENERATE = "generate"
    SCORE = "score"
    EMBED = "embed"


class Pooling(StrEnum):
    """Hidden states of a prompt, after the final norm, that form its vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    """Hidden state of the first token."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ThoughtBound(msgspec.Struct, frozen=True):
    """Bound on the thought before an answer."""

    max_tokens: int
    """Number of tokens after which only the end token is allowed."""
    begin: int
    """Token id that begins a thought."""
    end: int
    """Token id that ends a thought."""
    is_begun: bool = False
    """Whether the prompt ends inside the thought."""


class TokenRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rules for the tokens that may be generated, independent of their logits."""

    allowed: tuple[int, ...] = ()
    """The only tokens allowed; empty: any. Cannot be combined with a grammar."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated, unless no other token is allowed."""
    thought: ThoughtBound | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters for continuing a sequence. The gateway checks ranges."""

    max_tokens: int
    seed: int
    """Signed 64-bit. Always set (the gateway draws one if the caller did not)."""
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
    """In addition to the model's own end tokens."""
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of alternatives returned with the log-probability of each generated token (0 = none),
    or `ALL_TOKENS`. None: no log-probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: tokens to return, in this order, instead of the likeliest."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for all prompt tokens but the first. Then no cached prefix is reused."""
    rules: TokenRules | None = None


class AdapterSignature(msgspec.Struct, frozen=True):
    """Ed25519 signature of an adapter's content, and the raw public key that made it."""

    public_key: bytes
    signature: bytes


class AdapterRef(msgspec.Struct, frozen=True):
    """Immutable adapter version. `digest` alone identifies it; `name` is for humans."""

    digest: str
    name: str = ""
    checksum: str = ""
    """SHA-256 (hex) of the packed image in the receiving worker's layout, as proved; empty if not
    proved for this layout yet."""
    is_ephemeral: bool = False
    """Whether the version is temporary, so that its packed image is not worth a file."""
    signed: AdapterSignature | None = None
    """Signature that the worker checks when it loads the image. None for an unsigned version."""


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
    """Tenant or sharing group. Prefixes are reused only within one."""
    adapter: AdapterRef | None = None
    activation: int = 0
    """Position from which the adapter acts; before it the base model alone (activated LoRA)."""
    cache_salt: str = ""
    tenant: str = ""
    weight: int = 1
    """Weight of the tenant among those with waiting requests."""
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    """Priority among the requests of the tenant."""
    timeout_s: float | None = None
    """Seconds after sending within which the first token is needed."""
    num_resumed: int = 0
    """Number of trailing `tokens` that are not prompt, because a lost worker generated them. They
    count as generated tokens everywhere, including `max_tokens`."""
    kind: OutputKind = OutputKind.GENERATE
    """`score` generates nothing: `max_tokens` is 0, and `prompt_logprobs` is set. `embed` generates
    nothing either; its vector is sent with the end of the sequence."""
    stream_interval: int = 1
    """Tokens per output frame, for clients that need not see each. The first is sent alone."""
    traceparent: str | None = None
    """W3C trace context of a traced request, for which the times of the stages are reported."""
    grammar: str = ""
    """Grammar of the generated text, in llguidance's JSON; empty: none."""
    pooling: Pooling = Pooling.LAST
    """For kind `embed`: how the vector is computed."""
    labels: tuple[int, ...] = ()
    """For kind `embed` with pooling `last`: the vector has the logits of these tokens after the
    prompt, in their order, instead of the hidden state."""
    waited_s: float = 0.0
    """Seconds that the request has waited at other workers, counted towards the maximum wait."""

    def ends(self, end_tokens: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end its sequence. end_tokens: of the model."""
        own = frozenset(self.params.stop_token_ids)
        return own | end_tokens if self.grammar or not self.params.ignore_eos else own


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Request to end a sequence. Answered by its end: a `SequenceOutput` with the reason `abort`,
    unless another end is already in flight."""

    id: int


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Request to load an adapter to the host tier; no answer."""

    model: str
    adapter: AdapterRef


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Request to prove that the adapter does what its files say; answered by one `ProbeResult`. Ids
    as for sequences, but counted separately."""

    id: int
    model: str
    adapter: AdapterRef


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Request to drop a probe that waits or is in progress; no answer. Sent to workers of version 7
    or newer."""

    id: int


class Pin(msgspec.Struct, frozen=True):
    model: str
    adapter: AdapterRef


class DesiredModel(msgspec.Struct, frozen=True):
    """Base model of the catalog. `is_pinned`: must be resident. `is_unloaded`: must not be."""

    digest: str
    name: str
    is_pinned: bool = False
    is_unloaded: bool = False


class Desired(msgspec.Struct, frozen=True, tag="desired"):
    """Pins and models of the catalog in this generation. Ignored if older than the last one."""

    generation: int
    pins: list[Pin]
    models: list[DesiredModel] = []


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Request to refuse new work and finish running sequences, or to accept work again.
    `WorkerStatus.draining` reports it."""

    is_on: bool = True


# Worker to gateway


class ModelInfo(msgspec.Struct, frozen=True):
    digest: str
    name: str
    max_model_len: int
    adapter_layout: str = ""
    """Name of the layout of packed adapter images for this model here."""
    cache_layout: str = ""
    """Name of the layout of KV pages, part of their keys."""


class Models(msgspec.Struct, frozen=True, tag="models"):
    """Models that replace those of the `Hello`, sent after a model was registered."""

    models: list[ModelInfo]


class Fingerprint(msgspec.Struct, frozen=True):
    """Model's answer to the probe prompt with the adapter: the likeliest next tokens."""

    tokens: list[int]
    logprobs: list[float]
    effect: float
    """Largest change of a log-probability of the probe due to the adapter."""


class ProbeResult(msgspec.Struct, frozen=True, tag="probed"):
    """Result of a `Probe`. `error` empty: proved. Otherwise an error code, and `message` says what
    differed. If `is_final` is false, the adapter may be correct and another try may succeed."""

    id: int
    layout: str = ""
    checksum: str = ""
    fingerprint: Fingerprint | None = None
    error: str = ""
    message: str = ""
    is_final: bool = True


class AdapterLoadTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of an adapter's load to the device, in seconds since its sequence arrived."""

    tier: str
    """Tier that it was loaded from: host, disk or store."""
    begun_s: float
    """Start of the load; 0 if it was before the sequence arrived."""
    ended_s: float
    copy_begun_s: float = 0.0
    """Start of the copy from the host; 0 if it was before the sequence arrived."""
    num_evicted: int = 0
    """Number of adapters evicted from the device for it."""


class SequenceTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of the stages of a sequence in a worker, in seconds since it arrived there. Sent with
    its first output and its end if it has a `traceparent`."""

    told_s: float
    """Time of this report; in the last output, time of the sequence's end."""
    started_s: float | None = None
    """Time when its first step began to be scheduled; None if it never ran."""
    first_token_s: float | None = None
    """Time of the first token generated here; None if there was none."""
    model_wait: tuple[float, float] | None = None
    """Times when its base model was unloaded (0 if before the sequence arrived) and when it was
    loaded again. None if it was loaded throughout."""
    adapter_load: AdapterLoadTimes | None = None
    """None if the adapter was on the device."""
    preempted_s: list[float] = []
    """Times of its first few preemptions."""
    num_preemptions: int = 0


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results of one step for one sequence, or of several with a `stream_interval`. Each sequence
    ends with one that has a `finish_reason`, or with a `Failed`."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first generated token (or with the finish, if none is generated)."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens from the prefix cache, as in `PromptProgress`; on the first and last output."""
    times: SequenceTimes | None = None
    """On the first output and the last, if the request has a `traceparent`."""
    vector: bytes | None = None
    """Vector of kind `embed`, sent with the finish: float32, little-endian, not normalised."""


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of the prompt of a sequence without output. Sent after each step that advanced it,
    and before the end of a sequence that is aborted or fails.

    A preempted sequence restarts its prompt. Progress is sent again once it exceeds what was
    reported.
    """

    id: int
    num_positions: int
    """Number of prompt positions computed or found in the prefix cache."""
    num_cached: int
    """Number of leading positions found in the prefix cache when the sequence started, or when it
    restarted and found more than was reported."""


class StepFrame(msgspec.Struct, frozen=True, omit_defaults=True, tag="step"):
    """All results of one engine step for this gateway. `progress` precedes `sequences`."""

    sequences: list[SequenceOutput]
    progress: list[PromptProgress] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: int
    code: ErrorCode
    message: str
    retry_after_s: float = 0.0
    """With `overloaded`: seconds until there may be room."""
    pace_s: float = 0.0
    """With `overloaded`, if the queue had no room for any such request of the tenant: seconds until
    the next place becomes free for it."""
    times: SequenceTimes | None = None
    """Times of the stages of a queued sequence, if the request has a `traceparent`."""


class AdapterStatus(msgspec.Struct, frozen=True):
    digest: str
    tier: str
    """host | device | loading; disk or store: not loaded, listed only for its `error`"""
    num_bytes: int
    leases: int
    pinned: bool
    error: str = ""
    """Error code of its last load, until one succeeds."""
    message: str = ""
    name: str = ""
    """`name@version` of the last request for it; empty if there was none."""


class ModelStatus(msgspec.Struct, frozen=True):
    digest: str
    name: str
    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Cached pages without a user. They count neither as free nor as used."""
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_adapter_evictions: int = 0
    num_integrity_failures: int = 0
    """Failed integrity checks, made when idle. Each is a bug of the worker."""
    tier: str = "device"
    """device | loading | draining (unloaded when idle) | host | cold | unsatisfiable"""
    num_bytes: int = 0
    """Bytes of its weights on the device, now or when last loaded; before that as planned."""
    num_swaps: int = 0
    """Number of loads to the device."""
    idle_s: float = 0.0
    """Seconds since its last request ended; 0 while it has any."""
    load_s: float = 0.0
    """Seconds of its load to the device, as last measured or as estimated."""
    error: str = ""
    """Error of the last load, until one succeeds."""
    max_num_seqs: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens of running and waiting sequences that are neither computed nor cached."""
    prefill_tokens_per_s: float = 0.0
    """Recent rate; before the first request, that of the warm-up. 0: unknown."""
    decode_step_s: float = 0.0
    """Mean seconds of recent steps without prefill; 0: unknown."""
    adapter_loads: dict[str, int] = {}
    """Number of loads to the tiers host and device, from the next lower one."""
    adapter_load_s: dict[str, float] = {}
    """Total seconds of these loads."""
    num_failed_adapter_loads: int = 0
    num_proof_steps: int = 0
    """Steps of proofs that are done. While the number grows, waiting probes advance."""
    itl: list[tuple[float, int]] = []
    """Histogram of the times between two tokens of a sequence in the last minute: (upper bound in
    seconds, number above the previous bound)."""


class TenantStatus(msgspec.Struct, frozen=True):
    """Bytes on the device charged to a tenant."""

    tenant: str
    """Tenant id; empty: bytes that no tenant requested."""
    kv_bytes: int
    """Pages that it computed, in use or cached."""
    adapter_bytes: int
    """Adapters that it was the last to request."""


def why_unsatisfiable(models: Sequence[ModelStatus]) -> str | None:
    """Returns why none of the models can ever be served, or None if one could or there is none."""
    if not models or any(model.tier != UNSATISFIABLE for model in models):
        return None
    return f"{models[0].name}: {UNSATISFIABLE}: {models[0].error}"


class WorkerStatus(msgspec.Struct, frozen=True, tag="status"):
    """State of a worker, sent every second and after a drain."""

    instance_id: str
    draining: bool
    models: list[ModelStatus]
    adapters: list[AdapterStatus]
    arena_bytes: int
    extents: str
    """One character per extent: '.' free, 'k' KV, 'a' adapters, 'w' weights."""
    settings: dict[str, str]
    step: int
    tokens_per_s: float
    generation: int = 0
    """Generation of the last `Desired` that was applied."""
    tenants: list[TenantStatus] = []
    """The tenants with the most device memory."""
    num_late_kernels: int = 0
    """Kernels compiled, or read from the cache, during requests after the worker was ready."""
    num_cached_adapters: int = 0
    """Images in the disk cache, including those of adapters in nearer tiers."""
    cached_adapter_bytes: int = 0


class CachedPages(msgspec.Struct, frozen=True, tag="cached"):
    """Pages added to and removed from the prefix cache of a model: the first 8 bytes of each key
    (`memory.page_key`), concatenated. `is_whole`: replaces all earlier keys."""

    model: str
    added: bytes
    removed: bytes = b""
    is_whole: bool = False


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Heartbeat sent every `PULSE_PERIOD_S` by the event loop that also carries all other frames. A
    worker that sends nothing is stopped, stuck or unreachable."""

    step_age_s: float = 0.0
    """Seconds of the engine's current step; 0 while it waits for work."""
    num_received: int = 0
    """Number of frames received from this gateway, including its Hello. If the gateway has sent
    more, its frames do not arrive."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    """Oldest version that this side supports."""
    instance_id: str
    models: list[ModelInfo] = []
    newest: int = 0
    """Newest version that this side supports; 0: `version` alone."""


def own_hello(instance_id: str, models: list[ModelInfo] | None = None) -> Hello:
    """Returns the Hello of a side of this version."""
    return Hello(OLDEST_VERSION, instance_id, models or [], PROTOCOL_VERSION)


def common_version(own: Hello, peer: Hello) -> int | None:
    """Returns the newest version that both sides support, or None if there is none."""
    newest = min(max(own.version, own.newest), max(peer.version, peer.newest))
    return newest if newest >= max(own.version, peer.version) else None


def version_needed(logprobs: int | None, logprob_token_ids: tuple[int, ...]) -> int:
    """Returns the oldest version whose workers answer a `Generate` with such log-probabilities as
    intended. Version 6 returns the likeliest tokens only, and not all of them."""
    return 7 if logprob_token_ids or logprobs == ALL_TOKENS else OLDEST_VERSION


ToWorker = Hello | Generate | Abort | Prefetch | Probe | Withdraw | Desired | Drain
ToGateway = Hello | Models | Pulse | StepFrame | Failed | ProbeResult | WorkerStatus | CachedPages
