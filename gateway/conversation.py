"""Defines the input of a chat template: messages, tools, and how the rendered text must end."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.generation_request import GenerationRequest, Tool, shown_tools
from gateway.messages import Message


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


def conversation_of(asked: GenerationRequest, messages: list[Message]) -> Conversation:
    """Returns the conversation of a request. It has no tools if the request's `tool_choice` is
    `none`."""
    return Conversation(
        messages,
        shown_tools(asked),
        asked.add_generation_prompt,
        asked.continue_final_message,
        asked.template_arguments,
    )


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
