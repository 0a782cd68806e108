"""Defines the fields that both of OpenAI's completion routes accept, with their bounds, and the
fields of OpenAI's and vLLM's requests that have no effect here.

A field outside the schemas is refused by name. `null`, `[]` and `{}` count as absent. `make api`
writes the fields without effect into docs/use/api-chat.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta

from gateway.dialects.dropped import EMPTY_STOP
from gateway.dialects.generation_fields import (
    ConstraintFields,
    Priority,
    TokenId,
    has_empty,
)
from gateway.dialects.history import is_absent
from gateway.exceptions import InvalidRequest
from gateway.limits.bounds import MAX_TOKEN_IDS
from gateway.request import Truncation

Short = Annotated[str, Meta(max_length=256)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]

WITHOUT_EFFECT = frozenset(("metadata", "prompt_cache_key", "spaces_between_special_tokens"))
"""Fields that need no action here, or hold only the client's notes. The header `loraplex-dropped`
does not name them."""
M = TypeVar("M")
MAX_NAMED_TOKENS = 128
MAX_SEQUENCES = 128
"""Maximum number of prompts times choices in one request."""
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
MaxTokens = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""Maximum tokens of an answer. -1 counts as absent, as in llama.cpp's clients."""
TruncateTokens = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Side = Literal["left", "right"]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]


class Wish(NamedTuple):
    """Mark of a field that is ignored. The answer's header `loraplex-dropped` names the field,
    unless its value is null, [], {} or in `nothing`."""

    nothing: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Refusal:
    """Mark of an unsupported field that would change the answer. The field is refused with the
    `reason`, unless its value is null, [], {} or in `nothing`. Hashed by identity, because
    `nothing` may contain lists and the annotations of fields must be hashable."""

    reason: str
    nothing: tuple[Any, ...] = ()
    takes_empty: bool = True
    """Whether [] and {} are accepted too."""


class FieldsWithoutEffect(ConstraintFields, frozen=True, kw_only=True):
    """Fields without effect that both chats and completions may have."""

    # The fields below have no effect, and no header names them.
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None

    cache_control: Annotated[Any, Wish()] = None
    request_id: Annotated[Short | None, Wish()] = None
    service_tier: Annotated[ServiceTier | None, Wish(("auto", "default"))] = None
    store: Annotated[bool | None, Wish((False,))] = None

    early_stopping: Annotated[Any, Refusal("There is no beam search.", (False,))] = None
    guided_decoding_backend: Annotated[Any, Refusal("There is one, llguidance.")] = None
    guided_whitespace_pattern: Annotated[Any, Refusal("White space is bounded by the server.")] = (
        None
    )
    kv_transfer_params: Annotated[
        Any, Refusal("Prompts and answers are computed by one worker.")
    ] = None
    length_penalty: Annotated[Any, Refusal("There is no beam search.", (1,))] = None
    logits_processors: Annotated[Any, Refusal("Code of a request is not run.")] = None
    use_beam_search: Annotated[Any, Refusal("There is none; use `n`.", (False,))] = None
    vllm_xargs: Annotated[Any, Refusal("There are no plug-ins to take them.")] = None

    def __post_init__(self) -> None:
        for name, mark in marked(type(self), Refusal).items():
            if (value := getattr(self, name)) is not None:
                check_refused(name, value, mark.reason, mark.nothing, mark.takes_empty)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the ignored fields that the request has set."""
        found: list[str] = []
        for name, wish in sorted(marked(type(self), Wish).items()):
            value = getattr(self, name)
            if not is_absent(value) and value not in wish.nothing:
                found.append(name)
        return tuple(sorted([*found, *self.dropped_values]))

    @property
    def dropped_values(self) -> list[str]:
        """Names of ignored values of supported fields."""
        return [EMPTY_STOP] if has_empty(self.stop) else []


@cache
def marked(request: type[FieldsWithoutEffect], mark: type[M]) -> Mapping[str, M]:
    """Returns the marks of type `mark` in a request's schema, by field name."""
    hints = get_type_hints(request, include_extras=True)
    return {
        name: found
        for name, hint in hints.items()
        for found in getattr(hint, "__metadata__", ())
        if isinstance(found, mark)
    }


def check_refused(
    name: str, value: Any, reason: str, nothing: Sequence[Any], takes_empty: bool = True
) -> None:
    """Raises InvalidRequest, with the `reason`, unless the value is absent or in `nothing`."""
    if value is None or value in nothing or (takes_empty and is_absent(value)):
        return
    choices = " or ".join(msgspec.json.encode(each).decode() for each in (*nothing, None))
    raise InvalidRequest(
        f"Unsupported parameter: '{name}' may only be {choices}. {reason}".replace("`", "'"),
        param=name,
        code="unsupported_parameter",
    )


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted without effect."""
    continuous_usage_stats: bool | None = None
    """Whether each chunk of a choice has the usage so far. Needs `include_usage`."""


class OpenAIRequest(FieldsWithoutEffect, frozen=True, kw_only=True):
    """Fields of both completion routes."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Dropped unless the answer is streamed."""
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    """Number of likeliest tokens returned with each prompt token. Not allowed in a stream."""
    truncate_prompt_tokens: TruncateTokens | None = None
    """Maximum tokens kept of the prompt. -1 keeps the maximum for which the context has room."""
    truncation_side: Side | None = None
    """Side at which `truncate_prompt_tokens` cuts. Default: `left`, the beginning."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    """Accepted if it is 1 or equals `n`, because every generated answer is returned."""
    return_token_ids: bool | None = None
    """If true, each choice has `token_ids`, the ids of the tokens that `completion_tokens` counts,
    including the end token. In a stream, each chunk has its own ids. `prompt_token_ids` are in each
    choice of a completion, next to the choices of a chat, and in a stream's first chunk."""
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_NAMED_TOKENS)] | None = None
    """Alternatives reported with each token, instead of the likeliest. Needs `logprobs`."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities name a token by its id, as `token_id:17`, not by its text."""

    user: str | None = None
    """Key by which requests are split between a canary's versions. Default:
    `safety_identifier`, then the API key."""
    safety_identifier: str | None = None

    def neutral_fields(self) -> dict[str, Any]:
        """Returns the fields of the `Request` that chats and completions have in common."""
        return {
            "model": self.model,
            "stream": bool(self.stream),
            "num_choices": self.n or 1,
            **self.sampling(),
            "num_prompt_logprobs": self.prompt_logprobs,
            "logprob_token_ids": tuple(self.logprob_token_ids or ()),
            "returns_token_ids": bool(self.return_token_ids),
            "truncation": truncation(self.truncate_prompt_tokens, self.truncation_side or "left"),
            "user": self.user or self.safety_identifier,
            "constraint": self.constraint(),
            "dropped": self.dropped,
        }

    @property
    def dropped_values(self) -> list[str]:
        is_dropped = self.stream_options not in (None, StreamOptions()) and not self.stream
        return [*super().dropped_values, *(["stream_options"] if is_dropped else [])]

    @property
    def include_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest(
                "Unsupported parameter: 'best_of' may only be 'n', 1 or null: every answer that is "
                "made is given.",
                param="best_of",
                code="unsupported_parameter",
            )
        check_truncation(self.truncate_prompt_tokens)
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "'prompt_logprobs' come with a whole answer; 'stream' must be false.",
                param="prompt_logprobs",
            )


class InputFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that requests for vectors and requests for scores share, as in vLLM."""

    truncate_prompt_tokens: TruncateTokens | None = None
    """Maximum tokens of an input, or of a query together with its document. Longer inputs are cut;
    of a query and a document, the document is cut. -1 stands for the context's length."""
    truncation_side: Side | None = None
    """Side at which `truncate_prompt_tokens` cuts. Default: `right`, the end."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. Default: true for a text, and false for the
    output of a chat template."""
    priority: Priority | None = None

    def __post_init__(self) -> None:
        check_truncation(self.truncate_prompt_tokens)

    def input_fields(self) -> dict[str, Any]:
        """Returns these fields as a `Request` has them."""
        return {
            "truncation": truncation(self.truncate_prompt_tokens, self.truncation_side or "right"),
            "priority": self.priority or 0,
            "add_special_tokens": self.add_special_tokens,
        }


def most_tokens(given: int | None, param: str, *, allows_none: bool = False) -> int | None:
    """Returns the maximum number of tokens of an answer, or None if `given` is absent or -1. Raises
    InvalidRequest if `given` is 0, unless `allows_none` is set."""
    if given == 0 and not allows_none:
        raise InvalidRequest(
            f"'{param}' must be at least 1, or -1 for as many tokens as without it.", param=param
        )
    return None if given == -1 else given


def truncation(num_tokens: int | None, side: Side) -> Truncation | None:
    """Returns the truncation to `num_tokens` tokens, or None if `num_tokens` is None."""
    return None if num_tokens is None else Truncation(num_tokens, side)


def check_truncation(num_tokens: int | None) -> None:
    """Raises InvalidRequest if `num_tokens` is 0, because the prompt would be empty."""
    if num_tokens == 0:
        raise InvalidRequest(
            "'truncate_prompt_tokens' must be -1 or at least 1.", param="truncate_prompt_tokens"
        )


def prompts_of(given: str | list[str | int | list[int]], *, param: str) -> list[str | list[int]]:
    """Returns the prompts, each as text or as token ids. Raises InvalidRequest if `given` mixes
    texts and token ids."""
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
