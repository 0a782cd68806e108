"""Requests to workers and their results, as the engine and the gateways share them. Does not import
torch. `workers.wire.frames` has the frames in which they are exchanged, and the rules for adding a
field.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain

import msgspec

from adapters.reference import AdapterRef
from memory.page_key import PageHasher

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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float
    top: list[tuple[int, float]]


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


class ModelInfo(msgspec.Struct, frozen=True):
    digest: str
    name: str
    max_model_len: int
    adapter_layout: str = ""
    """Name of the layout in which the worker packs the images of the model's adapters."""
    cache_layout: str = ""
    """Name of the layout of the model's KV pages. It is hashed into the pages' keys."""


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
