"""Defines conversations, into which every API dialect translates its own: messages, tools, and how
the text that a chat template renders must end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec


class MadeCall(msgspec.Struct, frozen=True):
    """Tool call in an earlier answer."""

    id: str
    name: str
    arguments: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect. Its arguments are an object, not
        JSON text."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(msgspec.Struct, frozen=True):
    """Turn of a conversation. Only a turn of the assistant has `reasoning` and `calls`, and only a
    turn of a tool has a `call_id`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    """Name of the speaker, or of the tool."""
    reasoning: str = ""
    """Text that the model wrote before this answer."""
    calls: list[MadeCall] = []
    call_id: str | None = None
    """Id of the call whose result this message is."""

    @property
    def num_chars(self) -> int:
        """Number of characters of the content."""
        return len(self.content)

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect, without absent fields."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            shown["name"] = self.name
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.calls:
            shown["tool_calls"] = [call.for_template() for call in self.calls]
        if self.call_id is not None:
            shown["tool_call_id"] = self.call_id
        return shown


def in_turns(
    messages: Iterable[Message], goes_on: Callable[[Message, Message], bool]
) -> list[Message]:
    """Returns the messages, each joined to the previous one if `goes_on(previous, message)` says
    that it continues the same turn."""
    turns: list[list[Message]] = []
    for message in messages:
        if turns and goes_on(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _joined(turns: Sequence[Message]) -> Message:
    """Joins consecutive messages of one role."""
    if len(turns) == 1:
        return turns[0]
    return Message(
        turns[0].role,
        "\n".join([turn.content for turn in turns if turn.content]),
        reasoning="\n".join([turn.reasoning for turn in turns if turn.reasoning]),
        calls=[call for turn in turns for call in turn.calls],
    )


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments. The arguments are an object."""
    strict: bool = False
    """Whether arguments are constrained to the schema during generation."""

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


class NamedTool(msgspec.Struct, frozen=True):
    """Choice of tools that requires a call of the tool `name`."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    """Choice of tools that shows the model all of the request's tools, but allows calls of only
    some."""

    names: tuple[str, ...]
    must_call: bool
    """Whether the answer must call one of the tools `names`."""


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


class Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: list[Tool] = []
    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the text ends with the last message's content, which the model continues."""
    template_arguments: dict[str, Any] = {}
    """Additional variables for the template."""

    @property
    def uses_tools(self) -> bool:
        """Whether the conversation has tools, calls or results."""
        return bool(self.tools) or any(each.calls or each.role == "tool" for each in self.messages)

    @property
    def num_chars(self) -> int:
        """Number of characters that a template may render: the contents of messages, and everything
        else as JSON."""
        total = sum([message.num_chars for message in self.messages])
        for message in self.messages:
            if message.calls or message.reasoning:
                total += len(message.reasoning) + _size(message.calls)
        if self.tools or self.template_arguments:
            total += _size(self.tools) + _size(self.template_arguments)
        return total


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
