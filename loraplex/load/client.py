"""Client that streams answers of an OpenAI-compatible server and records when tokens arrive.

Uses plain sockets and a parser in C, so that it can share a few cores with the measured server.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from typing import Any, NamedTuple

import httptools
import httpx
import msgspec

from loraplex.errors import BadSettings, reason_of

CONNECT_S = 10.0
"""Maximum seconds for opening a connection."""
READ_BYTES = 65536
MAX_LINE_BYTES = 1 << 20
"""Maximum bytes of one event, and of the body of a refusal."""
MAX_MESSAGE = 300
"""Maximum characters kept of a failure's message."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Call(NamedTuple):
    """Request for a streamed answer."""

    group: str
    """Name of the class of requests to which this request belongs."""
    key: str | None
    path: str
    """Path below the server's base URL, such as `/completions`."""
    body: bytes


class Outcome(msgspec.Struct, gc=False):
    """Outcome of a call. Times are seconds of time.perf_counter()."""

    group: str
    begun_s: float
    """Time at which the call should have been sent."""
    arrivals_s: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """Arrival time of each event with text."""
    ended_s: float = 0.0
    status: int = 0
    error: str = ""
    """Code of an error of the server or of this client. Empty if the answer is complete."""
    message: str = ""
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0

    def fail(self, code: str, message: object) -> None:
        """Records a failure. Only the first one counts."""
        if not self.error:
            self.error, self.message = code, str(message)[:MAX_MESSAGE]


class Client:
    """Client that reuses connections."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`url` is a base URL, with or without `/v1`. `timeout_s` limits one whole answer. Raises
        BadSettings if the URL is invalid."""
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BadSettings(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.host:
            raise BadSettings(f"{url!r} is not a URL of http or https")
        base = parts.raw_path.partition(b"?")[0].decode().rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._netloc = parts.netloc.decode()
        self._host = parts.raw_host.decode()
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = httpx.create_ssl_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._idle: deque[Stream] = deque()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        writers = [writer for _, writer in self._idle]
        self._idle.clear()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)

    async def send(self, call: Call, due_s: float | None = None) -> Outcome:
        """Sends a call and returns its outcome. An error of the server is recorded in the outcome,
        not raised. `due_s` is the time at which the call should have been sent, by default now."""
        outcome = Outcome(call.group, time.perf_counter() if due_s is None else due_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(call, outcome)
        except TimeoutError:
            outcome.fail("timeout", f"no complete answer within {self._timeout_s:g} s")
        outcome.ended_s = time.perf_counter()
        return outcome

    async def _exchange(self, call: Call, outcome: Outcome) -> None:
        request = self._request(call)
        while True:
            is_kept = bool(self._idle)
            try:
                stream = self._idle.pop() if is_kept else await self._connect()
            except (OSError, UnicodeError, OverflowError) as error:
                outcome.fail("connect_failed", f"{self._netloc}: {reason_of(error)}")
                return
            answer = _Answer(outcome)
            may_keep = False
            try:
                stream[1].write(request)
                may_keep = await answer.read(stream[0])
                # The call is sent again only if the connection was reused, because the server may
                # have closed it before the call arrived.
                if answer.has_begun or not is_kept:
                    if not answer.has_begun:
                        outcome.fail("connection_lost", "closed without an answer")
                    return
            except OSError as error:
                if answer.has_begun or not is_kept:
                    outcome.fail("connection_lost", reason_of(error))
                    return
            finally:
                if may_keep:
                    self._idle.append(stream)
                else:
                    stream[1].close()

    async def _connect(self) -> Stream:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise OSError(f"no connection within {CONNECT_S:g} s") from error

    def _request(self, call: Call) -> bytes:
        lines = [
            f"POST {self._base}{call.path} HTTP/1.1",
            f"Host: {self._netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(call.body)}",
            "User-Agent: loraplex-bench",
        ]
        if call.key is not None:
            lines.append(f"Authorization: Bearer {call.key}")
        return "\r\n".join([*lines, "", ""]).encode() + call.body


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    """Ids of the tokens in an event. An event may have tokens whose text is not complete yet."""

    @property
    def has_output(self) -> bool:
        delta = self.delta or _Delta()
        said = (self.text, self.token_ids, delta.content, delta.reasoning_content, delta.reasoning)
        return any(said)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


class _Answer:
    """Parser of one answer. httptools calls the methods that begin with `on_`."""

    def __init__(self, outcome: Outcome) -> None:
        self.has_begun = False
        self._outcome = outcome
        self._parser: httptools.HttpResponseParser | None = None
        self._now_s = 0.0
        self._rest = b""
        """Beginning of a line that is not complete yet, or of a refusal's body."""
        self._is_done = False
        """Whether the event `[DONE]` has arrived."""
        self._is_complete = False
        self._may_keep = False

    async def read(self, reader: asyncio.StreamReader) -> bool:
        """Reads the whole answer. Returns whether the connection can be reused. Raises OSError."""
        outcome = self._outcome
        parser = self._parser = httptools.HttpResponseParser(self)
        try:
            while not self._is_complete and not outcome.error:
                data = await reader.read(READ_BYTES)
                if not data:
                    break
                self.has_begun = True
                self._now_s = time.perf_counter()
                parser.feed_data(data)
        except httptools.HttpParserError as error:
            outcome.fail("bad_answer", f"not HTTP: {error}")
        finally:
            # Breaks the reference cycle of the parser and the answer.
            self._parser = None
        if self.has_begun:
            self._close()
        return self._may_keep

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._outcome.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        seen = self._rest + data
        if self._outcome.status == 200:
            *lines, seen = seen.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._read_event(line[5:].strip())
        if len(seen) > MAX_LINE_BYTES:
            self._outcome.fail("bad_answer", f"more than {MAX_LINE_BYTES} bytes in one line")
            seen = b""
        self._rest = seen

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._is_complete = True
        self._may_keep = self._parser.should_keep_alive()

    def _read_event(self, data: bytes) -> None:
        outcome = self._outcome
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            outcome.fail("bad_answer", f"an event is not one of a stream: {error}")
            return
        if event.error is not None:
            outcome.fail(*_told(event.error, "stream_error"))
        if any(choice.has_output for choice in event.choices):
            outcome.arrivals_s.append(self._now_s)
        if (usage := event.usage) is not None:
            details = usage.prompt_tokens_details
            outcome.num_prompt, outcome.num_output = usage.prompt_tokens, usage.completion_tokens
            outcome.num_cached = (details and details.cached_tokens) or 0

    def _close(self) -> None:
        """Completes the outcome once the answer or its connection has ended."""
        outcome = self._outcome
        if outcome.status == 200:
            if not self._is_done:
                outcome.fail("stream_cut", "the stream ended without [DONE]")
            outcome.num_output = outcome.num_output or len(outcome.arrivals_s)
            return
        try:
            error = _event.decode(self._rest).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = None
        outcome.fail(*_told(error, f"http_{outcome.status}"))


def _told(error: Any, code: str) -> tuple[str, str]:
    """Returns the code and message of a server's error. `code` replaces a missing code."""
    if not isinstance(error, dict):
        return code, str(error or "")
    given = error.get("code") or error.get("type")
    return str(given or code)[:MAX_MESSAGE], str(error.get("message") or "")
