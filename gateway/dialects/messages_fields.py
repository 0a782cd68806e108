"""The schema of Anthropic's Messages, with its bounds.

A field that stands in a struct is supported, or dropped and named where it stands under that
comment (`dropped`); every other field is refused by name. `null` always means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.dialects.chat_messages import MAX_MESSAGES, MAX_TOOLS
from gateway.dialects.constraints import Schema
from gateway.dialects.history import MAX_PARTS
from gateway.dialects.openai_fields import Count
from gateway.dialects.sampling_fields import Probability, StopString


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """Tokens that the thought may have; then it is ended."""

    # dropped
    display: Literal["summarized", "omitted"] | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of the caller's."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(Choice, frozen=True, tag="auto"):
    pass


class AnyChoice(Choice, frozen=True, tag="any"):
    pass


class NoChoice(Choice, frozen=True, tag="none"):
    pass


class NamedChoice(Choice, frozen=True, kw_only=True, tag="tool"):
    name: str


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    """The answer is JSON that the schema accepts."""

    schema: Schema


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, `reasoning_effort`."""
    format: SchemaFormat | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What answering and counting take."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """Each a `role` and a `content` of text or blocks."""
    system: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NoChoice | NamedChoice | None = None
    thinking: Thinking | None = None
    """A variable of the chat template, `enable_thinking`."""
    output_config: OutputConfig | None = None

    # dropped
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
    }

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    metadata: Metadata | None = None

    # dropped
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None


class CountTokensRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
    }


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageAnswer(msgspec.Struct, frozen=True):
    """The answer of /v1/messages; fields as Anthropic's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, Any]


class MessagesErrorDetails(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: dict[str, str | None]
    """`error_code` is the code that other dialects have; `param` names the wrong field."""


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """The body of every error on this dialect's routes, as Anthropic shapes it."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str
