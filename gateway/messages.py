"""The messages of a conversation, as every dialect gives them to a chat template."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of type None are what an answer's message has when it is sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def num_chars(self) -> int:
        """Characters of its content."""
        content = self.content or ""
        return len(content) if isinstance(content, str) else sum([len(p.text) for p in content])

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text content, `developer` under its older name."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        shown = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return shown if self.name is None else {**shown, "name": self.name}
