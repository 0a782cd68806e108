"""Writes the answers of OpenAI's Responses: a stream of numbered events about items, or a body."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.dialects.dialect import Answer, AnswerFormat, slices
from gateway.dialects.openai_format import scored_token
from gateway.dispatch.sequence import Delta, Scored
from gateway.exceptions import to_failure
from gateway.limits.admission import Usage
from gateway.text.detokenizer import TokenBytes
from gateway.text.parsers.parser import Part, Reasoning, Text, ToolCall, part_key
from web.error_answers import error_body
from workers.wire.protocol import TokenLogprobs

encode = msgspec.json.encode
NAMES = {Text: "output_text", Reasoning: "reasoning_text", ToolCall: "function_call_arguments"}
"""Middle of an event's name, such as `response.output_text.delta`, by type of part."""
FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Error codes of a failed response, by HTTP status. Other statuses have `server_error`."""
NOTHING = Text("")
"""Text of an answer that has no item, such as one that is cut within the markers of a call. Clients
expect an item in every answer."""
CARRIED = "loraplex:"
"""Prefix of the `encrypted_content` that this server writes."""


class ResponsesFormat(AnswerFormat):
    """Answer to one request, which has one choice."""

    def __init__(
        self,
        request_id: str,
        echoed: dict[str, Any],
        spelled: TokenBytes,
        *,
        carries_reasoning: bool = False,
        summarises: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """echoed: fields that every response object of the answer repeats, including `id`.
        spelled: map of token ids to bytes.
        carries_reasoning: whether `encrypted_content` repeats the reasoning, because some clients
            send back only that field.
        summarises: whether the summary repeats the reasoning, because some clients show only the
            summary.
        namespaces: namespace of each function and the function's name there, by the name by which
            the model calls the function.
        """
        self._request_id = request_id
        self._echoed = echoed | {"created_at": int(time.time())}
        self._spelled = spelled
        self._carries_reasoning = carries_reasoning
        self._summarises = summarises
        self._namespaces = namespaces or {}
        self._number = 0
        """Sequence number of the next event."""
        self._done: list[dict[str, Any]] = []
        """Completed items of the stream."""
        self._part: Part | None = None
        """First piece of the part in progress."""
        self._written: list[str] = []
        """Pieces of text of the part in progress."""
        self._scores: list[bytes] = []
        """Log-probabilities, as JSON, of each token of the part in progress."""
        self._finish_reason: str | None = None

    def start(self, usage: Usage) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        return b"".join([self._piece(part) for part in delta.parts])

    def end(self, usage: Usage) -> bytes:
        closed = self._close(is_last=True)
        if not self._done:
            closed += self._open(NOTHING) + self._close(is_last=True)
        status = self._status(self._finish_reason)
        response = self._response(status, self._done, usage_object(usage))
        return closed + self._event(f"response.{status}", response=response)

    def error_event(self, error: Exception) -> bytes:
        """Returns two events. `response.failed` has the response so far. `error` follows because
        the official client raises an exception for it, so that no application mistakes the text for
        a whole answer."""
        failure = to_failure(error)
        body = error_body(failure)
        told = {name: body["error"][name] for name in ("code", "message", "param")}
        code = FAILURES.get(failure.status, "server_error")
        response = self._response("failed", [*self._done, *self._unfinished()], None)
        response["error"] = {"code": code, "message": told["message"]}
        failed = self._event("response.failed", response=response)
        return failed + self._event("error", **told, **body)

    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        (answer,) = answers
        self._finish_reason = answer.finish_reason
        parts = answer.parts or [NOTHING]
        items: list[dict[str, Any]] = []
        for number, part in enumerate(parts):
            text = text_of(part)
            is_last = number == len(parts) - 1
            if isinstance(part, Text):
                self._scores = await self._all_written(part.scored)
            items.append(self._item(part, number, text, self._item_status(is_last=is_last)))
        status = self._status(answer.finish_reason)
        return [encode(self._response(status, items, usage_object(usage)))]

    def _piece(self, part: Part) -> bytes:
        """Returns the events of a part's piece. The first piece of a part begins an item."""
        begun = b""
        if self._part is None or part_key(self._part) != part_key(part):
            begun = self._close() + self._open(part)
        text = text_of(part)
        if not text:
            return begun
        self._written.append(text)
        scores: dict[str, Any] = {}
        if isinstance(part, Text):
            written = [self._score_written(entry) for entry in part.scored]
            self._scores += written
            scores = {"logprobs": _array(written)}
        name = f"response.{NAMES[type(part)]}.delta"
        told = self._event(name, **self._place(), delta=text, **scores)
        return begun + told + self._summary_event(part, "text.delta", delta=text)

    def _open(self, part: Part) -> bytes:
        self._part, self._written, self._scores = part, [], []
        index = len(self._done)
        item = self._item(part, index, None, "in_progress")
        added = self._event("response.output_item.added", output_index=index, item=item)
        if isinstance(part, ToolCall):
            return added
        added += self._event(
            "response.content_part.added", **self._place(), part=self._content_part(part, "")
        )
        return added + self._summary_event(part, "part.added", part=summary_part(""))

    def _close(self, *, is_last: bool = False) -> bytes:
        """Returns the events that end the item in progress, or empty bytes if there is none."""
        part = self._part
        if part is None:
            return b""
        text, place = "".join(self._written), self._place()
        status = self._item_status(is_last=is_last)
        name = f"response.{NAMES[type(part)]}.done"
        if isinstance(part, ToolCall):
            _, called = self._namespaces.get(part.name, ("", part.name))
            closed = self._event(name, **place, name=called, arguments=text)
        else:
            scores = {"logprobs": _array(self._scores)} if isinstance(part, Text) else {}
            closed = self._event(name, **place, text=text, **scores)
            closed += self._event(
                "response.content_part.done", **place, part=self._content_part(part, text)
            )
            closed += self._summary_event(part, "text.done", text=text)
            closed += self._summary_event(part, "part.done", part=summary_part(text))
        index = len(self._done)
        self._done.append(self._item(part, index, text, status))
        self._part = None
        return closed + self._event(
            "response.output_item.done", output_index=index, item=self._done[-1]
        )

    def _unfinished(self) -> list[dict[str, Any]]:
        """Returns the item in progress, incomplete, or an empty list if there is none."""
        if self._part is None:
            return []
        text = "".join(self._written)
        return [self._item(self._part, len(self._done), text, "incomplete")]

    def _place(self) -> dict[str, Any]:
        """Returns the fields of an event that say which item is in progress."""
        index = len(self._done)
        assert self._part is not None
        place = {"item_id": self._item_id(self._part, index), "output_index": index}
        return place if isinstance(self._part, ToolCall) else place | {"content_index": 0}

    def _summary_event(self, part: Part, name: str, /, **fields: Any) -> bytes:
        """Returns an event about the summary of the reasoning in progress. Returns empty bytes if
        `part` is not reasoning or no summary is requested."""
        if not (self._summarises and isinstance(part, Reasoning)):
            return b""
        place = self._place()
        place["summary_index"] = place.pop("content_index")
        return self._event(f"response.reasoning_summary_{name}", **place, **fields)

    def _item_id(self, part: Part, index: int) -> str:
        prefix = {Text: "msg", Reasoning: "rs", ToolCall: "fc"}[type(part)]
        return f"{prefix}_{self._request_id}_{index}"

    def _item(self, part: Part, index: int, text: str | None, status: str) -> dict[str, Any]:
        """Returns an item of the output. `text` is None if the item has just begun."""
        item: dict[str, Any] = {"id": self._item_id(part, index), "status": status}
        content = [] if text is None else [self._content_part(part, text)]
        match part:
            case Text():
                return item | {"type": "message", "role": "assistant", "content": content}
            case Reasoning():
                summary = [summary_part(text)] if self._summarises and text else []
                item |= {"type": "reasoning", "summary": summary, "content": content}
                if self._carries_reasoning and text is not None:
                    item["encrypted_content"] = carried(text)
                return item
            case ToolCall(index=number, name=name):
                call = {"call_id": f"call_{self._request_id}_{number}", "name": name}
                if name in self._namespaces:
                    call["namespace"], call["name"] = self._namespaces[name]
                return item | {"type": "function_call", **call, "arguments": text or ""}

    def _content_part(self, part: Part, text: str) -> dict[str, Any]:
        """Returns the content of a message or of reasoning. Calls have no content."""
        if not isinstance(part, Text):
            return {"type": "reasoning_text", "text": text}
        scores = _array(self._scores)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    async def _all_written(self, scored: Sequence[TokenLogprobs]) -> list[bytes]:
        """Returns the log-probabilities as JSON. Lets the event loop run between slices."""
        written: list[bytes] = []
        for piece in slices(scored):
            written += [self._score_written(entry) for entry in piece]
            await asyncio.sleep(0)
        return written

    def _score_written(self, entry: Scored) -> bytes:
        return encode(scored_token(self._spelled, entry))

    def _item_status(self, *, is_last: bool) -> str:
        """Returns an ended item's status. A truncated answer's last item is `incomplete`."""
        return self._status(self._finish_reason) if is_last else "completed"

    def _status(self, finish_reason: str | None) -> str:
        return "incomplete" if finish_reason == "length" else "completed"

    def _response(
        self, status: str, output: Sequence[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            **self._echoed,
            "object": "response",
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": usage,
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(data))


def text_of(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text


def summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _array(written: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%s]" % b",".join(written))


def carried(reasoning: str) -> str:
    """Encodes reasoning for `encrypted_content`. Does not encrypt it, because the answer contains
    the text anyway."""
    return CARRIED + base64.b64encode(reasoning.encode()).decode()


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
