"""Defines the schema of OpenAI's Responses, with its bounds.

Fields that have no effect follow a comment that says so. The answer's header `loraplex-dropped`
names them. All other fields of the structs are supported, and fields that no struct has are refused
by name. `null` always means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.dialects.chat_completions import ReasoningEffort
from gateway.dialects.chat_messages import MAX_MESSAGES, Tools
from gateway.dialects.function_tools import AllowedMode
from gateway.dialects.generation_fields import (
    JsonObjectFormat,
    Name,
    SamplingFields,
    Schema,
    Strict,
    TextFormat,
)
from gateway.dialects.openai_fields import MaxTokens, TopLogprobs, check_refused, most_tokens
from gateway.exceptions import InvalidRequest


class FunctionChoice(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag="function",
):
    name: str
    namespace: str | None = None


class AllowedChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """Choice among only some of the request's tools."""

    mode: AllowedMode
    tools: Tools


class TextSchemaFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"
):
    """Constraint of the answer to a schema's JSON. If a keyword cannot be enforced, `strict`
    refuses the request. Otherwise the keyword is dropped."""

    schema: Schema
    name: Name | None = None
    description: str | None = None
    strict: Strict | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | TextSchemaFormat | None = None

    # The fields below have no effect, and the answer's header names them.
    verbosity: Any = None


Summary = Literal["auto", "concise", "detailed", "none"]


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    """Variable of the chat template. "none" sets `enable_thinking` to false instead."""
    summary: Summary | None = None
    """Any value except "none" repeats the text of reasoning items as their summary, because some
    clients show only summaries."""
    generate_summary: Summary | None = None
    """Older name of `summary`."""

    # The fields below have no effect, and the answer's header names them.
    context: Any = None
    mode: Any = None

    @property
    def summarises(self) -> str | None:
        """Requested kind of summary. None if reasoning is not summarised."""
        asked = self.summary or self.generate_summary
        return None if asked == "none" else asked


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # The fields below have no effect, and the answer's header names them.
    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "input": "Where is my parcel?",
        "max_output_tokens": 64,
    }

    model: Annotated[str, Meta(min_length=1)]
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """Text of a user, or items. An item with a role but no type is a message."""
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    stream: bool | None = None
    tools: Tools | None = None
    """Functions and namespaces of functions. Tools of other types are dropped."""
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    """Labels of the client, which the answer repeats."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    """Key by which requests are split between a canary's versions. Default:
    `safety_identifier`, then the API key."""
    safety_identifier: Annotated[str, Meta(max_length=1024)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: TopLogprobs | None = None
    """Number of likeliest tokens reported with each token of the text."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    background: bool | None = None
    previous_response_id: str | None = None

    # The fields below have no effect, and the answer's header names them.
    cache_control: Any = None
    client_metadata: Any = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported with each token. None if scores are not requested."""
        is_asked = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of the answer, or None for the default."""
        return most_tokens(self.max_output_tokens, "max_output_tokens")

    @property
    def carries_reasoning(self) -> bool:
        """Whether reasoning items also have their text in `encrypted_content`."""
        return "reasoning.encrypted_content" in (self.include or ())

    def __post_init__(self) -> None:
        self.check_min_tokens(self.most_tokens, "max_output_tokens")
        check_refused(
            "background", self.background, "Stream the answer: it is kept open.", (False,)
        )
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "Unsupported parameter: 'previous_response_id'. Responses are not stored: send the "
                "conversation so far as 'input'.",
                param="previous_response_id",
                code="unsupported_parameter",
            )


class ResponseAnswer(msgspec.Struct, frozen=True):
    """Answer of /v1/responses, with OpenAI's fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    store: bool
