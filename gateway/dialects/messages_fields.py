"""Defines the schema of Anthropic's Messages, with its bounds.

Fields that have no effect follow a comment that says so. The answer's header `loraplex-dropped`
names them. All other fields of the structs are supported, and fields that no struct has are refused
by name. `null` always means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.dialects.chat_messages import MAX_MESSAGES, MAX_TOOLS
from gateway.dialects.generation_fields import MAX_STOPS, Probability, Schema, StopString
from gateway.dialects.history import MAX_PARTS
from gateway.dialects.openai_fields import Count


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    """Maximum tokens of the thought, which is ended at this length."""

    # The fields below have no effect, and the answer's header names them.
    display: Literal["summarized", "omitted"] | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Function that the client offers."""

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
    """Constraint of the answer to a schema's JSON."""

    schema: Schema


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Variable `reasoning_effort` of the chat template."""
    format: SchemaFormat | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both answering and counting accept."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """Messages with a `role` and a `content` of text or blocks."""
    system: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NoChoice | NamedChoice | None = None
    thinking: Thinking | None = None
    """Variable `enable_thinking` of the chat template."""
    output_config: OutputConfig | None = None

    # The fields below have no effect, and the answer's header names them.
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """Body of POST /v1/messages."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
    }

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    metadata: Metadata | None = None

    # The fields below have no effect, and the answer's header names them.
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None


class CountTokensRequest(Conversation, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
    }


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageAnswer(msgspec.Struct, frozen=True):
    """Answer of /v1/messages, with Anthropic's fields."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, Any]
