"""Finds out whether a chat template shows all instructions and results of a conversation.

Many templates skip the roles that they do not expect, so that an instruction is missing from the
prompt without an error. A template may also change a text, for example to JSON, so the absence of a
text from the prompt is no proof. Therefore a conversation of the same shape, with a mark in place
of each text, is rendered too. The answer is remembered for each shape.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from gateway.request import Conversation, MadeCall, Message, Tool

MAX_SHAPES = 256
"""Maximum number of shapes whose answers are remembered for a template."""
REPEATED = re.compile(r"(.{1,6}?)\1{2,}", re.DOTALL)
"""Turns, as characters, that occur at least three times in a row."""
FILLER = "ok"
"""Content of the assistant's messages. Templates may leave out these messages."""


class _Turn(NamedTuple):
    """Part of a message that decides how a template shows it, as far as it does not look at the
    text."""

    role: str
    has_content: bool
    num_calls: int
    has_reasoning: bool
    has_name: bool
    is_result: bool

    def message(self, number: int) -> Message:
        """Returns a message of this kind. Its content is a mark, unless it is the assistant's."""
        content = FILLER if self.role == "assistant" else _mark(number)
        call_ids = [f"call{call:05}" for call in range(self.num_calls)]
        return Message(
            self.role,
            content if self.has_content else "",
            name="lookup" if self.has_name else None,
            reasoning=FILLER if self.has_reasoning else "",
            calls=[MadeCall(id, "lookup", {}) for id in call_ids],
            call_id="call00000" if self.is_result else None,
        )


class Shape(NamedTuple):
    """Kinds of a conversation's turns."""

    kinds: tuple[_Turn, ...]
    """Different kinds of turns, in the order of their first occurrence."""
    turns: str
    """Turns, each as the character whose code is the index of its kind."""
    num_tools: int
    others: str
    """Other values that a template may read."""

    def shortened(self) -> Shape:
        """Returns the shape with turns that repeat three times or more repeated only twice.
        Conversations that grow have few such shapes."""
        return self._replace(turns=REPEATED.sub(r"\1\1", self.turns))

    def marked(self, conversation: Conversation) -> tuple[Conversation, list[str]]:
        """Returns a conversation of this shape, and the marks in it. `conversation` is one of the
        same shape, whose other values are used."""
        turns = [self.kinds[ord(turn)] for turn in self.turns]
        messages = [turn.message(number) for number, turn in enumerate(turns)]
        marks = [each.content for each in messages if each.content not in ("", FILLER)]
        tools = [Tool(name=_mark(number), description="-") for number in range(-self.num_tools, 0)]
        marks += [tool.name for tool in tools]
        return Conversation(
            messages,
            tools,
            conversation.add_generation_prompt,
            conversation.continue_final_message,
            conversation.template_arguments,
        ), marks


def shape_of(conversation: Conversation) -> Shape:
    """Returns the shape of a conversation."""
    kinds: dict[_Turn, int] = {}
    turns: list[str] = []
    for message in conversation.messages:
        turn = _Turn(
            message.role,
            bool(message.content.strip()),
            len(message.calls),
            bool(message.reasoning),
            message.name is not None,
            message.call_id is not None,
        )
        turns.append(chr(kinds.setdefault(turn, len(kinds))))
    others = (
        conversation.add_generation_prompt,
        conversation.continue_final_message,
        conversation.template_arguments,
    )
    return Shape(tuple(kinds), "".join(turns), min(len(conversation.tools), 2), repr(others))


class ShownTurns:
    """Memory of the shapes of conversations that a template shows completely."""

    def __init__(self, render: Callable[[Conversation], str | None]) -> None:
        """`render` returns the prompt, or None if the template refuses the conversation."""
        self._render = render
        self._known: OrderedDict[Shape, bool] = OrderedDict()

    def are_shown(self, conversation: Conversation, shape: Shape) -> bool:
        """Returns whether the template shows all instructions and results of conversations of this
        shape, and their tools. Returns True if the template refuses the marks."""
        known = self._known.get(shape)
        if known is None:
            marked, marks = shape.marked(conversation)
            text = self._render(marked)
            shown = None if text is None else text.lower()
            known = shown is None or all(mark in shown for mark in marks)
            self._known[shape] = known
            if len(self._known) > MAX_SHAPES:
                self._known.popitem(last=False)
        return known


def contains(text: str, conversation: Conversation) -> bool:
    """Returns whether a prompt contains all instructions and results as they are, in their
    order."""
    end = 0
    for message in conversation.messages:
        content = message.content.strip()
        if message.role == "assistant" or not content:
            continue
        begin = text.find(content, end)
        if begin < 0:
            return False
        end = begin + len(content)
    return True


def _mark(number: int) -> str:
    return f"zq{number + MAX_NUMBER}qz"


MAX_NUMBER = 10_000
"""Number that is added to a mark's number, so that all marks have the same length and none contains
another."""
