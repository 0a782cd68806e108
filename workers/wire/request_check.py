"""Checks whether a model can run a request, before a sequence is built for the request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import isfinite

from memory.page_key import PAGE_TOKENS, pages_of
from workers.wire.protocol import (
    ALL_TOKENS,
    ErrorCode,
    Generate,
    OutputKind,
    Pooling,
    SamplingParams,
)

MAX_NAMED = 128
"""Maximum number of `logprob_token_ids` of a request."""
MAX_LABELS = 64
"""Maximum number of labels of a request. It is limited because the labels' logits are copied to the
host."""


INT64 = 1 << 63
RANGES: dict[str, tuple[float, float]] = {
    "seed": (-INT64, INT64 - 1),
    "choice": (0, INT64 - 1),
    "temperature": (0, 1e6),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "repetition_penalty": (1e-6, 1e6),
    "logprobs": (ALL_TOKENS, MAX_NAMED),
    "prompt_logprobs": (0, MAX_NAMED),
}
"""Lowest and highest value of each sampling parameter that is an entry of an array or the size of
one. The gateway's ranges, which are narrower, produce its error messages. These ranges ensure that
no value fails or damages a step that other sequences share."""
MAX_BIAS = 1e6
"""Largest absolute value in `logit_bias`."""
MAX_WEIGHT = 1 << 31


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the requests to one model. max_pages: maximum number of KV pages of one sequence.
    end_tokens: the model's end tokens."""

    max_model_len: int
    max_pages: int
    vocab_size: int
    end_tokens: frozenset[int]


def check_request(request: Generate, limits: RequestLimits) -> tuple[ErrorCode, str] | None:
    """Returns None if the model can run the request, and otherwise the error code and the message
    of the refusal. Thread-safe."""
    message = _refusal(request, limits)
    if message is not None:
        return ErrorCode.INVALID, message
    num_prompt, max_tokens = len(request.tokens) - request.num_resumed, request.params.max_tokens
    if num_prompt + max_tokens > limits.max_model_len:
        return ErrorCode.PROMPT_TOO_LONG, (
            f"{num_prompt} prompt tokens and {max_tokens} to generate exceed "
            f"the model's {limits.max_model_len}"
        )
    num_pages = pages_of(num_prompt + max_tokens)
    if num_pages > limits.max_pages:
        return ErrorCode.PROMPT_TOO_LONG, (
            f"needs {num_pages} KV pages of {PAGE_TOKENS} tokens, the arena has {limits.max_pages}"
        )
    return None


def _refusal(request: Generate, limits: RequestLimits) -> str | None:
    """Returns the reason why the request is invalid, or None if it is valid."""
    params, tokens, vocab_size = request.params, request.tokens, limits.vocab_size
    if not 1 <= request.weight <= MAX_WEIGHT:
        return f"the weight must be in 1..{MAX_WEIGHT}, not {request.weight}"
    if not isfinite(request.waited_s) or not isfinite(request.timeout_s or 0.0):
        return "timeout_s and waited_s must be finite"
    if request.stream_interval < 1:
        return "the stream interval must be at least 1"
    if not tokens:
        return "the prompt is empty"
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return f"token ids must lie in 0..{vocab_size - 1}"
    if (refusal := _params_refusal(params, vocab_size)) is not None:
        return refusal
    if not 0 <= request.num_resumed < len(tokens):
        return "num_resumed must leave a prompt"
    if not 0 <= request.activation < len(tokens) - request.num_resumed:
        return "the adapter's activation must lie in the prompt"
    return (
        _logprobs_refusal(params, vocab_size)
        or _rules_refusal(request, vocab_size)
        or _kind_refusal(params, request.kind)
        or _vector_refusal(request, vocab_size)
        or _resumption_refusal(request, limits.end_tokens)
    )


def _params_refusal(params: SamplingParams, vocab_size: int) -> str | None:
    """Returns the reason why the sampler cannot use the parameters, or None if it can."""
    for name, (low, high) in RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            return f"{name} must be in {low}..{high}, not {value}"
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                return f"{name} ids must lie in 0..{vocab_size - 1}, not {token}"
    for value in (params.logit_bias or {}).values():
        if not abs(value) <= MAX_BIAS:
            return f"logit_bias values must be in {-MAX_BIAS}..{MAX_BIAS}, not {value}"
    return None


def _kind_refusal(params: SamplingParams, kind: OutputKind) -> str | None:
    """Returns the reason why the parameters do not fit the kind of output, or None if they fit."""
    if kind is OutputKind.GENERATE and params.max_tokens < 1:
        return "max_tokens must be at least 1"
    if kind is OutputKind.SCORE and params.max_tokens != 0:
        return "max_tokens must be 0 where only the prompt is scored"
    if kind is OutputKind.SCORE and params.prompt_logprobs is None:
        return "prompt_logprobs must be set where only the prompt is scored"
    if kind is OutputKind.EMBED and (params.max_tokens != 0 or params.prompt_logprobs is not None):
        return "max_tokens must be 0 and prompt_logprobs absent where a vector is asked for"
    return None


def _logprobs_refusal(params: SamplingParams, vocab_size: int) -> str | None:
    """Returns the reason why the requested log-probabilities cannot be computed, or None if they
    can."""
    named = params.logprob_token_ids
    if not named:
        return None
    if params.logprobs is None:
        return "logprob_token_ids need logprobs"
    if len(named) > MAX_NAMED or not 0 <= min(named) <= max(named) < vocab_size:
        return f"at most {MAX_NAMED} logprob_token_ids are taken, each in 0..{vocab_size - 1}"
    return None


def _rules_refusal(request: Generate, vocab_size: int) -> str | None:
    """Returns the reason why the request's token rules are invalid, or None if they are valid."""
    rules = request.params.rules
    if rules is None:
        return None
    if rules.allowed and request.grammar:
        return "allowed tokens cannot be given beside a grammar"
    if not all(rules.banned):
        return "a banned sequence needs a token"
    ends = () if rules.thought is None else (rules.thought.begin, rules.thought.end)
    if any(not 0 <= token < vocab_size for token in chain(rules.allowed, ends, *rules.banned)):
        return f"token ids of rules must lie in 0..{vocab_size - 1}"
    return None


def _vector_refusal(request: Generate, vocab_size: int) -> str | None:
    """Returns the reason why the requested vector cannot be computed, or None if it can."""
    labels = request.labels
    if not labels:
        return None
    if request.kind is not OutputKind.EMBED or request.pooling is not Pooling.LAST:
        return "labels need the kind embed and the pooling last"
    if len(labels) > MAX_LABELS or not 0 <= min(labels) <= max(labels) < vocab_size:
        return f"at most {MAX_LABELS} labels are taken, each in 0..{vocab_size - 1}"
    return None


def _resumption_refusal(request: Generate, end_tokens: frozenset[int]) -> str | None:
    """Returns the reason why a sequence that another worker began cannot be resumed, for example
    that it has already generated an end token. Returns None if the sequence can be resumed, or is
    new."""
    if not request.num_resumed:
        return None
    params, resumed = request.params, request.tokens[-request.num_resumed :]
    if len(resumed) >= params.max_tokens:
        return "num_resumed must be less than max_tokens"
    if not request.ends(end_tokens).isdisjoint(resumed):
        return "the resumed tokens hold an end token"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs come with the first token: a resumed sequence has none"
    return None
