"""The fields that both of OpenAI's completion routes take, with their bounds.

A field that stands in a struct here is supported; what becomes of others says `openai_table.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from gateway.dialects.openai_table import FieldsWithoutEffect
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_TOKEN_IDS

MAX_SEQUENCES = 128
"""Prompts times choices of one request."""
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
MAX_BIASES = 300
"""Entries of `logit_bias`: each is put into every step's input anew."""
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 256
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted without effect."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: each chunk of a choice tells what it has used so far."""


class OpenAIRequest(FieldsWithoutEffect, frozen=True, kw_only=True):
    """What both completion routes take."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    stop: str | Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
    """Only these are generated; an empty list asks for nothing."""
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are not generated, with a space before them or without."""
    prompt_logprobs: TopLogprobs | None = None
    """The prompt's tokens, each with so many of the likeliest; not in a stream."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """The prompt keeps its last so many tokens; -1: as many as the context has room for."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    """Accepted where it is `n`: no more answers are made than are given."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    """Each choice also has `token_ids`, those that `completion_tokens` counts, the end token too;
    streamed, the chunk's own."""

    skip_special_tokens: bool | None = None
    """False: special tokens are in the text."""
    include_stop_str_in_output: bool | None = None
    """Whether the stop string that ends an answer is in its text."""
    user: str | None = None
    """Splits canaries; without it `safety_identifier` does, then the API key."""
    safety_identifier: str | None = None

    def neutral_fields(self) -> dict[str, Any]:
        """The fields of the neutral request that both routes give it in the same way."""
        return {
            "model": self.model,
            "stream": bool(self.stream),
            "num_choices": self.n or 1,
            "min_tokens": self.min_tokens or 0,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias or None,
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "bad_words": self.bad_words or [],
            "num_prompt_logprobs": self.prompt_logprobs,
            "truncate": self.truncate_prompt_tokens,
            "seed": self.seed,
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "user": self.user or self.safety_identifier,
            "constraint": self.constraint(),
            "skip_special_tokens": self.skip_special_tokens is not False,
            "shows_stop": bool(self.include_stop_str_in_output),
            "dropped": self.dropped,
        }

    def check_min_tokens(self, max_tokens: int | None) -> None:
        """Raises InvalidRequest if the answer could not have so many."""
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise InvalidRequest(
                f"'min_tokens' is {self.min_tokens}, and 'max_tokens' only {max_tokens}.",
                param="min_tokens",
            )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest(
                "Unsupported parameter: 'best_of' may only be 'n', 1 or null: every answer that is "
                "made is given.",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "'truncate_prompt_tokens' must be -1 or at least 1.", param="truncate_prompt_tokens"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "'prompt_logprobs' come with a whole answer; 'stream' must be false.",
                param="prompt_logprobs",
            )
        if self.stop == "" or (isinstance(self.stop, str) and len(self.stop) > 256):
            raise InvalidRequest("'stop' must have 1 to 256 characters.", param="stop")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )


def prompts_of(given: str | list[str | int | list[int]], *, param: str) -> list[str | list[int]]:
    """One entry a prompt, each text or token ids. Raises InvalidRequest if the kinds are mixed."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast(list[int], given)]
    if len(kinds) > 1:
        raise InvalidRequest(
            f"'{param}' must be a text, token ids, or a list of one of these.", param=param
        )
    return cast(list[str | list[int]], given)
