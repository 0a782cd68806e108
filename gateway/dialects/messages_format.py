"""Writes answers of Anthropic's Messages: a stream of events about content blocks, or a body."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.dialects.dialect import Answer, AnswerFormat
from gateway.dialects.history import DIRECT
from gateway.dispatch.sequence import Delta
from gateway.exceptions import to_failure
from gateway.limits.admission import Usage
from gateway.text.parsers.parser import Part, Reasoning, Text, ToolCall, part_key
from web.lone_surrogates import replace_lone_surrogates
from web.messages_errors import messages_error

encode = msgspec.json.encode
SIGNATURE = "unsigned"
"""Signature of thinking blocks. Nothing is signed, but clients drop a thought with an empty
signature, or send it back as text."""


NOTHING_TOLD = {"container": None, "stop_details": None}
"""Keys of a message and of the `message_delta` event that are always null here. Typed clients
expect them because Anthropic's schema has them."""
NOTHING_USED = {
    "cache_creation": None,
    "inference_geo": None,
    "service_tier": None,
    "speed": None,
}
"""Keys of a message's usage that are always null here. Anthropic's schema has them."""


class MessagesFormat(AnswerFormat):
    """Format of the answer to one Messages request. The answer has exactly one choice."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, message_id: str, request_id: str, model: str, stop_sequences: list[str]
    ) -> None:
        """`model` and `stop_sequences` are copied from the request."""
        self._id = message_id
        self._request_id = request_id
        self._model = model
        self._stop_sequences = stop_sequences
        self._index = -1
        """Index of the newest block."""
        self._open: tuple[type[Part], int] | None = None
        """Key (see `part_key`) of the part whose block is open. None if no block is open."""
        self._has_called = False
        self._finish_reason: str | None = None
        self._stop: str | int | None = None

    def start(self, usage: Usage) -> bytes:
        message = self._message([], None, None, usage)
        return event("message_start", message=message)

    def chunk(self, delta: Delta) -> bytes:
        self._finish_reason, self._stop = delta.finish_reason, delta.stop
        return b"".join([self._piece(part) for part in delta.parts])

    def end(self, usage: Usage) -> bytes:
        reason, sequence = self._stopped(self._finish_reason, self._stop, self._has_called)
        delta = {"stop_reason": reason, "stop_sequence": sequence, **NOTHING_TOLD}
        ended = event("message_delta", delta=delta, usage=usage_object(usage))
        return self._close() + ended + event("message_stop")

    def error_event(self, error: Exception) -> bytes:
        told = messages_error(to_failure(error), self._request_id)
        return b"event: error\ndata: %s\n\n" % encode(told)

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        (answer,) = answers
        parts = answer.parts
        has_called = any(isinstance(part, ToolCall) for part in parts)
        reason, sequence = self._stopped(answer.finish_reason, answer.stop, has_called)
        content = [self._block(part) for part in parts]
        return [encode(self._message(content, reason, sequence, usage))]

    def _piece(self, part: Part) -> bytes:
        """Returns the events of a part's piece. The first piece of a part begins a block."""
        match part:
            case Text(text=text):
                kind, name, written = b"text_delta", b"text", text
            case Reasoning(text=text):
                kind, name, written = b"thinking_delta", b"thinking", text
            case ToolCall(arguments=arguments):
                kind, name, written = b"input_json_delta", b"partial_json", arguments
                self._has_called = True
        begun = b""
        if self._open != part_key(part):
            begun = self._close()
            self._index += 1
            self._open = part_key(part)
            block = self._empty_block(part)
            begun += event("content_block_start", index=self._index, content_block=block)
        if not written:
            return begun
        return (
            b"%sevent: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":%s}}\n\n'
            % (begun, self._index, kind, name, encode(written))
        )

    def _close(self) -> bytes:
        """Returns the events that end the open block, or empty bytes if no block is open."""
        if self._open is None:
            return b""
        signed = b""
        if self._open[0] is Reasoning:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = event("content_block_delta", index=self._index, delta=delta)
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def _empty_block(self, part: Part) -> dict[str, Any]:
        """Returns the empty block to which the pieces of a part are added."""
        match part:
            case Text():
                return {"type": "text", "text": "", "citations": None}
            case Reasoning():
                return {"type": "thinking", "thinking": "", "signature": ""}
            case ToolCall(index=index, name=name):
                id = f"toolu_{self._request_id}_{index}"
                call: dict[str, Any] = {"type": "tool_use", "id": id, "name": name, "input": {}}
                return call | {"caller": DIRECT, "toolset_name": None}

    def _block(self, part: Part) -> dict[str, Any]:
        """Returns the content block of a complete part."""
        block = self._empty_block(part)
        match part:
            case Text(text=text):
                return block | {"text": text}
            case Reasoning(text=text):
                return block | {"thinking": text, "signature": SIGNATURE}
            case ToolCall(arguments=arguments):
                return block | {"input": read_arguments(arguments)}

    def _stopped(
        self, finish_reason: str | None, stop: str | int | None, has_called: bool
    ) -> tuple[str, str | None]:
        """Returns `stop_reason` and `stop_sequence`. A stop string of the adapter, which the client
        does not know, counts as the end of the turn."""
        if finish_reason == "length":
            return "max_tokens", None
        if isinstance(stop, str) and stop in self._stop_sequences:
            return "stop_sequence", stop
        return "tool_use" if has_called else "end_turn", None

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: Usage,
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            **NOTHING_TOLD,
            "diagnostics": None,
            "usage": usage_object(usage) | NOTHING_USED,
        }


def event(kind: str, /, **fields: Any) -> bytes:
    """Returns a server-sent event, which has its kind as its name and as its field `type`."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns the usage in Anthropic's form. `input_tokens` does not include cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thought_tokens},
        "server_tool_use": None,
    }


def read_arguments(arguments: str) -> msgspec.Raw:
    """Returns the arguments of a call as JSON. Returns {} if they are truncated or no object."""
    text = replace_lone_surrogates(arguments.encode())
    try:
        msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.Raw(text)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(b"{}")
