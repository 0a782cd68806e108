"""The schema of OpenAI's Responses, with its bounds.

A field that stands in a struct is supported, or dropped and named where it stands under that
comment (`dropped`); every other field is refused by name. `null` always means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.dialects.chat_completions import ReasoningEffort
from gateway.dialects.chat_messages import MAX_MESSAGES, Tools
from gateway.dialects.constraints import JsonObjectFormat, Name, Schema, TextFormat
from gateway.dialects.function_tools import AllowedMode
from gateway.dialects.openai_fields import Count, TopLogprobs
from gateway.dialects.openai_table import check_refused
from gateway.dialects.sampling_fields import SamplingFields
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
    """Only these of the request's tools may be called."""

    mode: AllowedMode
    tools: Tools


class TextSchemaFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"
):
    """JSON that a schema accepts. The answer is held to it. With `strict` a keyword that cannot be
    enforced is refused, else it is dropped."""

    name: Name
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | TextSchemaFormat | None = None

    # dropped
    verbosity: Any = None


Summary = Literal["auto", "concise", "detailed", "none"]


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    """A variable of the chat template; "none" sets `enable_thinking` to false instead."""
    summary: Summary | None = None
    """Any but "none": items of reasoning have their text as their summary too, where some clients
    read it."""
    generate_summary: Summary | None = None
    """The same under its older name."""

    # dropped
    context: Any = None
    mode: Any = None

    @property
    def summarises(self) -> str | None:
        """How reasoning is to be summarised; None: not at all."""
        asked = self.summary or self.generate_summary
        return None if asked == "none" else asked


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # dropped
    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses."""

    example: ClassVar[dict[str, Any]] = {
        "model": "support-bot",
        "input": "Where is my parcel?",
        "max_output_tokens": 64,
    }

    model: Annotated[str, Meta(min_length=1)]
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """A user's text, or items. A message may come without its type."""
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    tools: Tools | None = None
    """Functions, namespaces of functions, or of a type that is dropped."""
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    """Answered as it came."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    """Splits canaries; without it `safety_identifier` does, then the API key."""
    safety_identifier: Annotated[str, Meta(max_length=1024)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    top_logprobs: TopLogprobs | None = None
    """Likeliest tokens told beside each one of the text."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    background: bool | None = None
    previous_response_id: str | None = None

    # dropped
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
        """None: no log-probabilities are asked for."""
        is_asked = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def carries_reasoning(self) -> bool:
        """Whether items of reasoning carry it in `encrypted_content` too."""
        return "reasoning.encrypted_content" in (self.include or ())

    def __post_init__(self) -> None:
        self.check_min_tokens(self.max_output_tokens, "max_output_tokens")
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
    """The answer of /v1/responses; fields as OpenAI's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    store: bool
