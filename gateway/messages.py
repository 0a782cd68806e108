"""Defines the messages of a conversation, into which every API dialect translates its own
messages."""

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
