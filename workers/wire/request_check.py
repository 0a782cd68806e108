"""Check, on arrival, whether a request can run at all."""

from __future__ import annotations

from itertools import chain

from workers.scheduling.sequence import Sequence
from workers.wire.protocol import (
    ErrorCode,
    Generate,
    ModelInfo,
    OutputKind,
    Pooling,
    SamplingParams,
)

MAX_NAMED = 128
"""Maximum number of `logprob_token_ids` of a request."""
MAX_LABELS = 64
"""Maximum number of labels of a request. Their logits are copied to the host with each step."""


def check_request(
    sequence: Sequence, info: ModelInfo, vocab_size: int
) -> tuple[ErrorCode, str] | None:
    """Returns the error with which the request is refused, or None."""
    params, num_resumed = sequence.params, sequence.request.num_resumed
    if sequence.request.weight < 1:
        return ErrorCode.INVALID, "the weight must be at least 1"
    if sequence.request.stream_interval < 1:
        return ErrorCode.INVALID, "the stream interval must be at least 1"
    if not sequence.tokens:
        return ErrorCode.INVALID, "the prompt is empty"
    if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < vocab_size:
        return ErrorCode.INVALID, f"token ids must lie in 0..{vocab_size - 1}"
    if any(not 0 <= token < vocab_size for token in params.logit_bias or ()):
        return ErrorCode.INVALID, f"logit_bias ids must lie in 0..{vocab_size - 1}"
    if (message := _logprobs_refusal(params, vocab_size)) is not None:
        return ErrorCode.INVALID, message
    if (message := _rules_refusal(sequence.request, vocab_size)) is not None:
        return ErrorCode.INVALID, message
    if not 0 <= num_resumed < len(sequence.tokens):
        return ErrorCode.INVALID, "num_resumed must leave a prompt"
    if not 0 <= sequence.request.activation < sequence.num_prompt:
        return ErrorCode.INVALID, "the adapter's activation must lie in the prompt"
    if (message := _kind_refusal(params, sequence.request.kind)) is not None:
        return ErrorCode.INVALID, message
    if (message := _vector_refusal(sequence.request, vocab_size)) is not None:
        return ErrorCode.INVALID, message
    if num_resumed and (message := _resumption_refusal(sequence)) is not None:
        return ErrorCode.INVALID, message
    if sequence.max_len > info.max_model_len:
        return ErrorCode.PROMPT_TOO_LONG, (
            f"{sequence.num_prompt} prompt tokens and {params.max_tokens} to generate exceed "
            f"the model's {info.max_model_len}"
        )
    return None


def _kind_refusal(params: SamplingParams, kind: OutputKind) -> str | None:
    """Returns why the parameters do not fit the kind of output, or None."""
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
    """Returns why the requested log-probabilities cannot be computed, or None."""
    named = params.logprob_token_ids
    if not named:
        return None
    if params.logprobs is None:
        return "logprob_token_ids need logprobs"
    if len(named) > MAX_NAMED or not 0 <= min(named) <= max(named) < vocab_size:
        return f"at most {MAX_NAMED} logprob_token_ids are taken, each in 0..{vocab_size - 1}"
    return None


def _rules_refusal(request: Generate, vocab_size: int) -> str | None:
    """Returns why tokens cannot be drawn by the request's rules, or None."""
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
    """Returns why the requested vector cannot be computed, or None."""
    labels = request.labels
    if not labels:
        return None
    if request.kind is not OutputKind.EMBED or request.pooling is not Pooling.LAST:
        return "labels need the kind embed and the pooling last"
    if len(labels) > MAX_LABELS or not 0 <= min(labels) <= max(labels) < vocab_size:
        return f"at most {MAX_LABELS} labels are taken, each in 0..{vocab_size - 1}"
    return None


def _resumption_refusal(sequence: Sequence) -> str | None:
    """Returns why a resumed sequence cannot be resumed or has nothing left to generate, or None."""
    resumed = sequence.tokens[sequence.num_prompt :]
    if len(resumed) >= sequence.params.max_tokens:
        return "num_resumed must be less than max_tokens"
    if not sequence.end_tokens.isdisjoint(resumed):
        return "the resumed tokens hold an end token"
    if sequence.params.prompt_logprobs is not None:
        return "prompt_logprobs come with the first token: a resumed sequence has none"
    return None
