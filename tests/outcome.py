"""What becomes of a request, as its client sees it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from enum import StrEnum
from typing import Any

import httpx
import msgspec


class End(StrEnum):
    FINISHED = "finished"
    """All choices have a finish reason, and the answer is whole."""
    FAILED = "failed"
    """An error was told, as a status or as the last event."""
    TRUNCATED = "truncated"
    """The answer ended properly, without any of this."""
    BROKEN = "broken"
    """The connection was lost."""
    UNREACHABLE = "unreachable"
    """There was none."""
    HUNG = "hung"
    """Given up by the client."""


class Outcome(msgspec.Struct):
    end: End = End.TRUNCATED
    status: int | None = None
    """None: no head of an answer came."""
    head_s: float | None = None
    """Until it came. A stream's comes with its first token."""
    request_id: str = ""
    code: str | None = None
    """Of the error."""
    tokens: dict[int, list[int]] = {}
    """Generated and shown so far, by choice."""
    finish_reasons: dict[int, str] = {}
    usage: tuple[int, int] | None = None
    """Tokens of prompt and completion."""


async def complete(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    key: str,
    limit_s: float,
    timeout_s: float | None = None,
) -> Outcome:
    """Asks once for a completion, whole or streamed as `body` says. limit_s: so long the client
    waits for the end. timeout_s: how long the request says that it waits for the first token."""
    body = {"return_token_ids": True, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {key}"}
    if timeout_s is not None:
        headers["x-request-timeout"] = f"{timeout_s:.3f}"
    reading = _Reading(body.get("n", 1))
    try:
        async with (
            asyncio.timeout(limit_s),
            client.stream(
                "POST", "/v1/completions", json=body, headers=headers, timeout=None
            ) as answer,
        ):
            await reading.read(answer)
    except TimeoutError:
        reading.outcome.end = End.HUNG
    except httpx.ConnectError:
        reading.outcome.end = End.UNREACHABLE
    except httpx.TransportError:
        reading.outcome.end = End.BROKEN
    return reading.outcome


class _Reading:
    def __init__(self, num_choices: int) -> None:
        self.outcome = Outcome(tokens=defaultdict(list))
        self._num_choices = num_choices
        self._began_at = time.monotonic()

    async def read(self, answer: httpx.Response) -> None:
        self.outcome.status = answer.status_code
        self.outcome.head_s = time.monotonic() - self._began_at
        self.outcome.request_id = answer.headers["x-request-id"]
        if answer.headers["content-type"].startswith("text/event-stream"):
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))
        else:
            self._take((await answer.aread()).decode())
            self._take("[DONE]")

    def _take(self, data: str) -> None:
        """A chunk of a stream, or a whole body."""
        outcome = self.outcome
        if data == "[DONE]":
            if len(outcome.finish_reasons) == self._num_choices:
                outcome.end = End.FINISHED
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            outcome.end, outcome.code = End.FAILED, chunk["error"]["code"]
            return
        for choice in chunk["choices"]:
            outcome.tokens[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                outcome.finish_reasons[choice["index"]] = choice["finish_reason"]
        if usage := chunk.get("usage"):
            outcome.usage = usage["prompt_tokens"], usage["completion_tokens"]
