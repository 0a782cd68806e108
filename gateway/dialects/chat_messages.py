"""The messages and tools of OpenAI's chat completions: their schema, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.exceptions import InvalidRequest
from gateway.generation_request import NamedTool, Tool, ToolChoice
from gateway.messages import MadeCall, Message

T = TypeVar("T")

MAX_MESSAGES = 4096
MAX_CALLS = 256
"""Tool calls of one message at most."""
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
Nothing = Annotated[list[Any], Meta(max_length=0)]
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    arguments: str
    """A JSON object, as text; empty: none."""


class ChatToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    """Streamed calls have one; without effect."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of type None are what an answer's message has when it is sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ChatToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of the same."""
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None

    def neutral(self, place: str) -> Message:
        """The message without what is of this dialect alone. Raises InvalidRequest, which says the
        message's `place`."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        self._check(place)
        return Message(
            "system" if self.role == "developer" else self.role,
            content,
            self.name,
            self.reasoning_content or self.reasoning or "",
            [
                MadeCall(
                    call.id, call.function.name, read_arguments(call.function.arguments, place)
                )
                for call in self.tool_calls or ()
            ],
            self.tool_call_id,
        )

    def _check(self, place: str) -> None:
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"'{place}' needs 'content'.", param="messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"'{place}': only assistants have 'tool_calls'.", param="messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise InvalidRequest(
                f"'{place}': messages of role 'tool' have a 'tool_call_id', and no others.",
                param="messages",
            )


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


def neutral_messages(messages: list[ChatMessage]) -> list[Message]:
    """The messages of the neutral request. Raises InvalidRequest."""
    return [message.neutral(f"messages[{i}]") for i, message in enumerate(messages)]


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def neutral(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or NO_ARGUMENTS,
            strict=bool(self.strict),
        )


class ChatTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


def read_tools(
    given: Sequence[dict[str, Any]], kind: type[T], drops: re.Pattern[str], dropped: set[str]
) -> list[T]:
    """The tools of this kind. Those of a type that `drops` matches are added to the names of what
    is dropped. Raises InvalidRequest for any other."""
    found: list[T] = []
    for number, each in enumerate(given):
        type_name = each.get("type")
        if isinstance(type_name, str) and drops.fullmatch(type_name):
            dropped.add(f"tools.{type_name}")
            continue
        try:
            found.append(msgspec.convert(each, kind))
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"Invalid value for 'tools[{number}]': {error}.", param="tools"
            ) from None
    return found


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


ChatToolChoice = Literal["auto", "none", "required"] | NamedToolChoice


def neutral_choice(choice: ChatToolChoice | None) -> ToolChoice:
    if isinstance(choice, NamedToolChoice):
        return NamedTool(choice.function.name)
    return choice or "auto"


def read_arguments(text: str, place: str) -> dict[str, Any]:
    """The arguments of a call, of the message or item at `place`. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(
            f"'{place}': the arguments of a call must be a JSON object, as text.",
            param=place.partition("[")[0],
        ) from None
