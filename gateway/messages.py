"""The messages of a conversation, as every dialect gives them to a chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec


class MadeCall(msgspec.Struct, frozen=True):
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    arguments: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: the arguments are an object, not a text."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(msgspec.Struct, frozen=True):
    """One turn. Only an assistant's has reasoning and calls; only a tool's has a call's id."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    """Name of the speaker, or of the tool."""
    reasoning: str = ""
    """What the model wrote before this answer."""
    calls: list[MadeCall] = []
    call_id: str | None = None
    """The call that this is the result of."""

    @property
    def num_chars(self) -> int:
        """Characters of its content."""
        return len(self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: what it does not have is left out."""
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
    """The messages, each joined to the one before it if it goes on with that one's turn."""
    turns: list[list[Message]] = []
    for message in messages:
        if turns and goes_on(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _joined(turns: Sequence[Message]) -> Message:
    """Neighbouring messages of one role as one."""
    if len(turns) == 1:
        return turns[0]
    return Message(
        turns[0].role,
        "\n".join([turn.content for turn in turns if turn.content]),
        reasoning="\n".join([turn.reasoning for turn in turns if turn.reasoning]),
        calls=[call for turn in turns for call in turn.calls],
    )
