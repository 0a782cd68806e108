"""The public JSON of the data plane. A request struct is the table of its route's fields.

A field that stands in a struct is supported, or accepted without effect where it stands under that
comment; every other field is refused by name. `null` always means absent.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.catalog.cards import ModelCard
from gateway.exceptions import InvalidRequest
from gateway.messages import Message

MAX_BODY_BYTES = 10 << 20
MAX_SEQUENCES = 128
"""Prompts times choices of one request."""

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
MAX_TOKEN_IDS = 1 << 20
"""Of one prompt: more than any context; to look at ten times as many would hold up the loop."""
MAX_NESTED = 1 << 16
"""Brackets and colons of a body together: each may become an object, which takes half a microsecond
to make. So many are in a megabyte of JSON that is sent as a text."""
SMALL_BYTES = 1 << 16
"""A body of fewer bytes cannot have more of anything than the bounds allow."""
MAX_BIASES = 300
"""Entries of `logit_bias`: each is put into every step's input anew."""
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both completion routes understand."""

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
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    """Each choice also has `token_ids`, those of its text; streamed, the chunk's own."""

    user: str | None = None
    """Whom a canary set gives the same version each time; else it goes by the API key."""

    # accepted without effect
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Literal["auto"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def __post_init__(self) -> None:
        if self.store:
            raise InvalidRequest("Unsupported value: 'store' may only be false.", param="store")
        if self.stop == "" or (isinstance(self.stop, str) and len(self.stop) > 256):
            raise InvalidRequest("'stop' must have 1 to 256 characters.", param="stop")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
    }

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    # accepted without effect
    response_format: TextFormat | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        if any(m.content is None for m in self.messages):
            raise InvalidRequest("Each message needs 'content'.", param="messages")


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot@staging",
        "prompt": "Once",
        "max_tokens": 16,
    }

    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]],
            Meta(min_length=1, max_length=MAX_TOKEN_IDS),
        ]
    )
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    # accepted without effect
    best_of: Literal[1] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [self.prompt]  # pyright: ignore[reportReturnType]
        if len(kinds) > 1:
            raise InvalidRequest(
                "'prompt' must be a text, token ids, or a list of one of these.", param="prompt"
            )
        return self.prompt  # pyright: ignore[reportReturnType]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")
        if len(self.prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"'prompt' times 'n' is more than {MAX_SEQUENCES} sequences.", param="prompt"
            )


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text as a completion's prompt, or messages as a chat's."""

    example: ClassVar[dict[str, Any]] = {"model": "support-bot", "prompt": "Once"}

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    example: ClassVar[dict[str, Any]] = {"model": "support-bot", "tokens": [12, 7]}

    model: str
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


T = TypeVar("T")
UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?$")
PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>(?P<field>[^`.\[]*)[^`]*)`$")
REQUIRED = re.compile(r"missing required field `(?P<name>[^`]*)`")


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decodes and checks a body; InvalidRequest names the wrong, missing or unknown field, or says
    that there is more in it than may be decoded on the event loop."""
    if len(body) > SMALL_BYTES:
        _check_size(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def _check_size(body: bytes) -> None:
    """Counts what a decoder would make objects of. Raises InvalidRequest."""
    num_values = body.count(b",")
    num_nested = body.count(b"[") + body.count(b"{") + body.count(b":")
    if num_values > MAX_TOKEN_IDS or num_nested > MAX_NESTED:
        raise InvalidRequest(
            f"A body may have at most {MAX_TOKEN_IDS} commas and {MAX_NESTED} brackets and colons; "
            f"yours has {num_values} and {num_nested}. Send fewer prompts in one request.",
            code="request_too_large",
        )


def _explain(message: str) -> InvalidRequest:
    if found := UNKNOWN_FIELD.search(message):
        name, path = found["name"], found["path"]
        if path:
            return InvalidRequest(
                f"Unsupported field '{name}' in '{path}'.",
                param=re.split(r"[.\[]", path)[0],
                code="unsupported_parameter",
            )
        return InvalidRequest(
            f"Unsupported parameter: '{name}'.", param=name, code="unsupported_parameter"
        )
    if found := PATH.search(message):
        reason = message[: found.start()]
        return InvalidRequest(
            f"Invalid value for '{found['path'] or 'body'}': {reason}.",
            param=found["field"] or None,
        )
    missing = REQUIRED.search(message)
    return InvalidRequest(f"{message}.", param=missing["name"] if missing else None)
