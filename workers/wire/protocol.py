"""Protocol between gateways and workers: every frame that they exchange. Does not import torch.

A frame consists of a 4-byte big-endian length and one msgpack-encoded message of at most
`MAX_FRAME_BYTES`. Each side first sends its `Hello`. Both sides then use the newest version that
both support. A field that is added in a new version has a default. If a peer that ignores the field
would answer wrongly, the gateway's `version_needed` returns the new version for requests that use
the field. The gateway chooses the sequence ids, which are unique on its connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from memory.page_key import PageHasher

PROTOCOL_VERSION = 7
OLDEST_VERSION = PROTOCOL_VERSION - 1
"""Oldest version that a peer may use, which is the version of the previous release."""
MAX_FRAME_BYTES = 16 << 20
PULSE_PERIOD_S = 0.5
UNSATISFIABLE = "unsatisfiable"
"""Value of `ModelStatus.tier` for a model that the worker cannot serve with its configuration.
`ModelStatus.error` says why."""
ALL_TOKENS = -1
"""Value of `SamplingParams.logprobs` that requests the log-probabilities of all tokens."""
MAX_RETRY_S = 60.0
"""Maximum number of seconds that a refused client is told to wait before it tries again."""


class ErrorCode(StrEnum):
    """Reasons why a sequence failed, sent in `Failed`. Only the gateway maps them to HTTP status
    codes."""

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
    """Urgency of a request. Each service class has a guaranteed share of a worker."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class OutputKind(StrEnum):
    """Kind of result: generated tokens, log-probabilities of the prompt, or a vector for the
    prompt."""

    GENERATE = "generate"
    SCORE = "score"
    EMBED = "embed"


class Pooling(StrEnum):
    """Method by which a prompt's vector is made from the hidden states after the final norm. The
    vector is the state of the last token, the mean of all states, or the first token's state."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ThoughtBound(msgspec.Struct, frozen=True):
    """Limit on the length of the thought that a reasoning model generates before its answer."""

    max_tokens: int
    """Maximum number of tokens of the thought. Once the thought has this many tokens, only the
    token `end` is allowed."""
    begin: int
    """Token id that begins a thought."""
    end: int
    """Token id that ends a thought."""
    is_begun: bool = False
    """Whether the prompt ends inside the thought."""


class TokenRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rules for the tokens that may be generated, independent of their logits."""

    allowed: tuple[int, ...] = ()
    """Ids of the allowed tokens; empty if all are allowed. Cannot be combined with a grammar."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated, unless no other token is allowed."""
    thought: ThoughtBound | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters for generating the tokens of a sequence. The gateway checks their ranges, and a
    worker refuses what could harm other sequences (`workers.wire.request_check`)."""

    max_tokens: int
    seed: int
    """Sampling seed, a signed 64-bit integer. The gateway draws it if the client set none."""
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
    """Tokens that end the sequence, in addition to the model's own end tokens."""
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned for each generated token.
    `ALL_TOKENS` returns the log-probabilities of all tokens of the vocabulary, 0 returns only the
    generated token's log-probability, and None returns no log-probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids of tokens whose log-probabilities are returned, in this order, in place of the likeliest
    tokens. Requires `logprobs`."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned for each prompt token except
    the first. 0 and None mean the same as in `logprobs`. `ALL_TOKENS` is refused, because the
    answer would have an entry per prompt token and token of the vocabulary. Unless it is None, the
    sequence reuses no cached prefix."""
    rules: TokenRules | None = None

    @property
    def lists_vocabulary(self) -> bool:
        """Whether the log-probabilities of all tokens of the vocabulary are returned."""
        return self.logprobs == ALL_TOKENS and not self.logprob_token_ids

    @property
    def named_ids(self) -> Iterator[int]:
        """Token ids that the request names, and that may be generated even if the model's tokenizer
        has no token for them."""
        return chain(self.logit_bias or (), self.stop_token_ids)


class AdapterSignature(msgspec.Struct, frozen=True):
    """Ed25519 signature of an adapter's content, and the raw public key that verifies it."""

    public_key: bytes
    signature: bytes


class AdapterRef(msgspec.Struct, frozen=True):
    """Reference to an immutable adapter version. `digest` alone identifies the version, and `name`
    is for logs and messages."""

    digest: str
    name: str = ""
    checksum: str = ""
    """SHA-256 (hex) of the packed image in the receiving worker's layout, as an earlier probe of
    the adapter reported it. Empty if no probe for this layout has succeeded."""
    is_ephemeral: bool = False
    """Whether the version is temporary. The packed image of a temporary version is not kept in the
    disk cache."""
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
    """Name of a tenant, or of a group of tenants that share cached prefixes. A sequence reuses only
    prefixes that requests of the same domain computed."""
    adapter: AdapterRef | None = None
    activation: int = 0
    """Position from which the adapter is used (activated LoRA). All earlier positions are computed
    by the base model alone."""
    cache_salt: str = ""
    tenant: str = ""
    weight: int = 1
    """Weight of the tenant. Tenants share the worker in proportion to their weights."""
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    """Priority among the tenant's requests. Requests with a higher priority run first."""
    timeout_s: float | None = None
    """Seconds from the request's arrival at the worker until it expires. A request expires only if
    it is still waiting at that time and has no generated token. None if it never expires."""
    num_resumed: int = 0
    """Number of tokens at the end of `tokens` that another worker generated before the sequence was
    moved to this worker. These tokens count as generated tokens, including towards `max_tokens`,
    and not as prompt tokens."""
    kind: OutputKind = OutputKind.GENERATE
    """Kind of result. `score` and `embed` generate no tokens, so `max_tokens` is 0. `score`
    requires `prompt_logprobs`. The vector of `embed` is sent with the end of the sequence."""
    stream_interval: int = 1
    """Minimum number of tokens per output, which saves frames for clients that do not need each
    token at once. The first and the last output are sent without waiting for more tokens."""
    traceparent: str | None = None
    """W3C trace context. If set, the worker reports the times of the sequence's stages."""
    grammar: str = ""
    """Grammar of the generated text, in llguidance's format; empty if the text is not
    constrained."""
    pooling: Pooling = Pooling.LAST
    """Pooling that makes the vector. Used only for the kind `embed`."""
    labels: tuple[int, ...] = ()
    """Token ids. Unless empty, the vector has the logits that these tokens have after the prompt,
    in this order, instead of the hidden state. Allowed only for the kind `embed` with the pooling
    `last`."""
    waited_s: float = 0.0
    """Seconds of the request's maximum wait that it has spent at other workers."""

    def page_hasher(self, layout: str) -> PageHasher:
        """Returns the hasher of the keys of the request's pages in this layout of KV pages."""
        return PageHasher(
            model=self.model,
            domain=self.cache_domain,
            adapter=None if self.adapter is None else self.adapter.digest,
            activation=self.activation,
            salt=self.cache_salt,
            layout=layout,
        )

    def ends(self, end_tokens: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end the sequence. end_tokens: the model's own end tokens."""
        own = frozenset(self.params.stop_token_ids)
        return own | end_tokens if self.grammar or not self.params.ignore_eos else own


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Request to end a sequence. The worker answers with a `SequenceOutput` whose finish reason is
    `abort`, unless the sequence has already ended or failed."""

    id: int


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Request to load an adapter to the host tier. The worker sends no answer."""

    model: str
    adapter: AdapterRef


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Request to verify that the loaded adapter has the effect that its files describe. The worker
    answers with one `ProbeResult`. The gateway chooses the ids of probes. A probe and a sequence
    may have the same id."""

    id: int
    model: str
    adapter: AdapterRef


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Request to drop a probe that is queued or in progress. The worker sends no answer. Sent only
    to workers of protocol version 7 or newer."""

    id: int


class Pin(msgspec.Struct, frozen=True):
    model: str
    adapter: AdapterRef


class DesiredModel(msgspec.Struct, frozen=True):
    """Base model of the catalog. A worker must load the model if `is_pinned` is set, and must not
    load it if `is_unloaded` is set."""

    digest: str
    name: str
    is_pinned: bool = False
    is_unloaded: bool = False


class Desired(msgspec.Struct, frozen=True, tag="desired"):
    """Pinned adapters and base models of the catalog. `generation` increases with each change of
    the catalog. The worker ignores the frame if it has applied a newer generation."""

    generation: int
    pins: list[Pin]
    models: list[DesiredModel] = []


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Request to refuse new work and finish running sequences, or to accept work again if `is_on`
    is false. `WorkerStatus.draining` shows the worker's current state."""

    is_on: bool = True


# Worker to gateway


class ModelInfo(msgspec.Struct, frozen=True):
    digest: str
    name: str
    max_model_len: int
    adapter_layout: str = ""
    """Name of the layout in which the worker packs the images of the model's adapters."""
    cache_layout: str = ""
    """Name of the layout of the model's KV pages. It is hashed into the pages' keys."""


class Models(msgspec.Struct, frozen=True, tag="models"):
    """All models of the worker, which replace the models of its `Hello`. Sent when models have been
    registered or unregistered."""

    models: list[ModelInfo]


class Fingerprint(msgspec.Struct, frozen=True):
    """Likeliest next tokens after the probe's prompt, computed by the model with the adapter."""

    tokens: list[int]
    logprobs: list[float]
    effect: float
    """Largest absolute change that the adapter causes in a log-probability of the probe prompt."""


class ProbeResult(msgspec.Struct, frozen=True, tag="probed"):
    """Result of a `Probe`. If `error` is empty, the adapter has passed. Otherwise `error` is an
    error code, and `message` says what failed. If `is_final` is false, another probe may succeed,
    because the failure may have a cause other than the adapter."""

    id: int
    layout: str = ""
    checksum: str = ""
    fingerprint: Fingerprint | None = None
    error: str = ""
    message: str = ""
    is_final: bool = True


class AdapterLoadTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of an adapter's load to the device, in seconds since the arrival of the sequence that
    needs the adapter."""

    tier: str
    """Tier from which the adapter was loaded: "host", "disk" or "store"."""
    begun_s: float
    """Start of the load in seconds since the sequence arrived; 0 if the load began before."""
    ended_s: float
    copy_begun_s: float = 0.0
    """Start of the adapter's copy from the host to the device, in seconds since the sequence
    arrived; 0 if the copy began before."""
    num_evicted: int = 0
    """Number of adapters that were evicted from the device to make room for this adapter."""


class SequenceTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of a sequence's stages in a worker, in seconds since the sequence arrived there. Sent
    with the sequence's first output and with its end if the request has a `traceparent`."""

    told_s: float
    """Time of this report. In the last output, it is the time of the sequence's end."""
    started_s: float | None = None
    """Time when the scheduling of the sequence's first step began; None if it has not begun."""
    first_token_s: float | None = None
    """Time when this worker generated its first token; None if there is none yet."""
    model_wait: tuple[float, float] | None = None
    """Time when the base model was unloaded (0 if it was not loaded when the sequence arrived), and
    time when it had been loaded again (`told_s` if not yet). None if it was loaded all the time."""
    adapter_load: AdapterLoadTimes | None = None
    """Times of the adapter's load. None if the sequence has no adapter, or if the adapter was on
    the device when the sequence arrived."""
    preempted_s: list[float] = []
    """Times of the sequence's first few preemptions."""
    num_preemptions: int = 0


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results of one sequence from one step, or from several steps if `stream_interval` is above 1.
    The last message of a sequence is an output with a `finish_reason`, or a `Failed`."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt's tokens. Sent once, with the first generated token. If no
    token is generated, sent with the end of the sequence."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache, as in `PromptProgress`. Set on
    the first and the last output."""
    times: SequenceTimes | None = None
    """Times of the sequence's stages. Set on the first and the last output if the request has a
    `traceparent`."""
    vector: bytes | None = None
    """Vector of the kind `embed`, sent with the end of the sequence: float32, little-endian, not
    normalised."""


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a prompt whose sequence has no output yet. Sent after each step that has advanced
    the prompt, and before the end of a sequence that is aborted or fails.

    A preempted sequence computes its prompt again. Its progress is sent again once it exceeds the
    progress that was reported before the preemption.
    """

    id: int
    num_positions: int
    """Number of prompt positions that have been computed or found in the prefix cache."""
    num_cached: int
    """Number of leading positions that were found in the prefix cache when the sequence started.
    The number increases if the sequence restarts after a preemption and then finds more positions
    in the cache than it had computed before."""


class StepFrame(msgspec.Struct, frozen=True, omit_defaults=True, tag="step"):
    """All results of one engine step for this gateway. The gateway applies `progress` before
    `sequences`."""

    sequences: list[SequenceOutput]
    progress: list[PromptProgress] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: int
    code: ErrorCode
    message: str
    retry_after_s: float = 0.0
    """Seconds after which there may be room for the request. Set if the code is `overloaded`."""
    pace_s: float = 0.0
    """Predicted mean seconds until another place in the tenant's queue becomes free. 0 if there is
    no prediction, or if the queue may still accept other requests of the tenant."""
    times: SequenceTimes | None = None
    """Times of the sequence's stages. Set if the sequence was queued and the request has a
    `traceparent`."""


class AdapterStatus(msgspec.Struct, frozen=True):
    digest: str
    tier: str
    """Place of the adapter: "host", "device" or "loading". With "disk" or "store", the adapter is
    not loaded, and is listed only to report the `error` of its last load."""
    num_bytes: int
    leases: int
    pinned: bool
    error: str = ""
    """Error code if the adapter's last load failed, else empty."""
    message: str = ""
    name: str = ""
    """`name@version` under which the adapter was last requested; empty if it never was."""


class ModelStatus(msgspec.Struct, frozen=True):
    digest: str
    name: str
    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Number of cached pages that no sequence uses. They count neither as free nor as used."""
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_adapter_evictions: int = 0
    num_integrity_failures: int = 0
    """Number of failed integrity checks, which run while the worker is idle. A failure means that
    the worker has a bug."""
    tier: str = "device"
    """Place of the weights: "device", "loading" (to the device), "draining" (on the device, and
    unloaded once the model is idle), "host", "cold" (not fetched yet) or "unsatisfiable"."""
    num_bytes: int = 0
    """Bytes that the weights occupy on the device, or occupied when they were last loaded. If they
    were never loaded, this is the planned number of bytes."""
    num_swaps: int = 0
    """Number of times that the model was loaded to the device."""
    idle_s: float = 0.0
    """Seconds since the model's last request ended; 0 while it has requests."""
    load_s: float = 0.0
    """Seconds that the last load to the device took, or an estimate if the model was never
    loaded."""
    error: str = ""
    """Error message if the model's last load failed, else empty."""
    max_num_seqs: int = 0
    num_waiting_tokens: int = 0
    """Number of prompt tokens of running and waiting sequences that are neither computed nor
    cached."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens computed per second in recent steps, or in the warm-up before the first
    request; 0 if unknown."""
    decode_step_s: float = 0.0
    """Mean seconds of recent steps that computed no prompt; 0 if unknown."""
    adapter_loads: dict[str, int] = {}
    """Number of adapter loads to each tier, "host" or "device"."""
    adapter_load_s: dict[str, float] = {}
    """Total seconds of adapter loads to each tier, "host" or "device"."""
    num_failed_adapter_loads: int = 0
    num_proof_steps: int = 0
    """Number of finished steps of adapter verifications. While it grows, queued probes make
    progress."""
    itl: list[tuple[float, int]] = []
    """Histogram of the inter-token latencies of the last minute. Each entry is a pair: the upper
    bound of a bucket in seconds, and the number of latencies in this bucket. The lower bound is the
    previous entry's bound."""


class TenantStatus(msgspec.Struct, frozen=True):
    """Device memory that is charged to a tenant."""

    tenant: str
    """Tenant id; empty for memory that no tenant requested."""
    kv_bytes: int
    """Bytes of the KV pages that the tenant's sequences computed, whether in use or only cached."""
    adapter_bytes: int
    """Bytes of the adapters whose most recent request came from this tenant."""


def why_unsatisfiable(models: Sequence[ModelStatus]) -> str | None:
    """Returns the reason why the worker can serve none of its models. Returns None if the worker
    can serve at least one model, possibly later, or has no models."""
    if not models or any(model.tier != UNSATISFIABLE for model in models):
        return None
    return f"{models[0].name}: {UNSATISFIABLE}: {models[0].error}"


class WorkerStatus(msgspec.Struct, frozen=True, tag="status"):
    """State of a worker, sent every second and after a `Drain`."""

    instance_id: str
    draining: bool
    models: list[ModelStatus]
    adapters: list[AdapterStatus]
    arena_bytes: int
    extents: str
    """One character for each extent of the arena: '.' free, 'k' KV, 'a' adapters, 'w' weights."""
    settings: dict[str, str]
    step: int
    tokens_per_s: float
    generation: int = 0
    """Generation of the last `Desired` that the worker applied."""
    tenants: list[TenantStatus] = []
    """Tenants that use the most device memory."""
    num_late_kernels: int = 0
    """Number of kernels that were compiled, or read from the kernel cache, after the worker had
    become ready."""
    num_cached_adapters: int = 0
    """Number of adapter images in the disk cache, including images of adapters that are also on the
    host or the device."""
    cached_adapter_bytes: int = 0
    num_unlisted_adapters: int = 0
    """Number of adapters that `adapters` leaves out, because the list has a maximum length."""
    adapter_counts: dict[str, int] = {}
    """Number of adapters by their nearest tier, "host", "device" or "loading", including those that
    are not listed. Empty from a worker of an older version, which lists all adapters."""
    adapter_bytes: dict[str, int] = {}
    """Bytes of adapters by their nearest tier, as in `adapter_counts`."""


class CachedPages(msgspec.Struct, frozen=True, tag="cached"):
    """Pages that were added to and removed from a model's prefix cache. `added` and `removed` are
    concatenations of the first 8 bytes of each page's key (`memory.page_key`). If `is_whole` is
    set, `added` replaces all keys that were sent before."""

    model: str
    added: bytes
    removed: bytes = b""
    is_whole: bool = False


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Heartbeat, sent every `PULSE_PERIOD_S` seconds by the event loop that also sends all other
    frames. A worker that sends no frame has stopped, is stuck or is unreachable."""

    step_age_s: float = 0.0
    """Seconds since the engine's current step began; 0 while the engine waits for work."""
    num_received: int = 0
    """Number of frames that the worker has received from this gateway, including its Hello. If the
    number stays below the number of frames sent, the gateway's frames do not arrive."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    """Oldest version that this side supports."""
    instance_id: str
    models: list[ModelInfo] = []
    newest: int = 0
    """Newest version that this side supports; 0 if it supports only `version`."""


def own_hello(instance_id: str, models: list[ModelInfo] | None = None) -> Hello:
    """Returns the Hello that this process sends."""
    return Hello(OLDEST_VERSION, instance_id, models or [], PROTOCOL_VERSION)


def common_version(own: Hello, peer: Hello) -> int | None:
    """Returns the newest version that both sides support, or None if there is none."""
    newest = min(max(own.version, own.newest), max(peer.version, peer.newest))
    return newest if newest >= max(own.version, peer.version) else None


ToWorker = Hello | Generate | Abort | Prefetch | Probe | Withdraw | Desired | Drain
ToGateway = Hello | Models | Pulse | StepFrame | Failed | ProbeResult | WorkerStatus | CachedPages
