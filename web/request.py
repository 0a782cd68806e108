"""Request to the gateway or admin plane, whose body has limits on its size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from litestar import Request
from litestar.datastructures import State
from litestar.types import Empty

from web.content_coding import Decoder, check_not_compressed, decoder_of_body
from web.errors import Overloaded, Stalled, TooLarge
from web.held_bytes import Excess, held_body
from web.request_head import announced_bytes, find_header, number_request

U = TypeVar("U")

DECODED_AT_ONCE = 1 << 20
"""Bytes that are decoded before the event loop runs other tasks. This takes about 3 ms."""
_TOO_SLOW = "The body of the request came too slowly."
_EXCEEDED = {
    "tenant": "Too many bytes of this tenant's requests are being read.",
    "all": "Too many bytes of requests are being read.",
}


class UploadPace:
    """Minimum rate at which a client must send a body of any length. Time that the server takes
    between two chunks does not count."""

    def __init__(self, idle_s: float, min_rate: int) -> None:
        """The client must send `min_rate` bytes per second, averaged over `idle_s` seconds in which
        the server waits for it."""
        self._idle_s = idle_s
        self._min_bytes = round(min_rate * idle_s)
        self._waited_s, self._num_bytes = 0.0, 0

    @property
    def excess(self) -> str:
        """Message of the error for a client that is too slow."""
        return f"Fewer than {self._min_bytes} bytes came in {self._idle_s:g} s."

    def latest_end(self, now: float) -> float:
        """Returns the time by which the next chunk must arrive."""
        return now + self._idle_s - self._waited_s

    def add(self, waited_s: float, num_bytes: int) -> None:
        """Records a chunk of `num_bytes` bytes, for which the server waited `waited_s` seconds."""
        self._waited_s += waited_s
        self._num_bytes += num_bytes
        if self._num_bytes >= self._min_bytes:
            self._waited_s, self._num_bytes = 0.0, 0


class BodyReader:
    """Reader of the body of one request."""

    scope: Any
    receive: Any

    @property
    def num_body_bytes(self) -> int:
        """Content-Length of the request, or 0 if the header is missing."""
        return announced_bytes(self.scope)

    async def chunks(
        self, max_bytes: int | None, pace: UploadPace | None = None
    ) -> AsyncGenerator[bytes]:
        """Yields the body in chunks as it arrives.

        The body's bytes count as held in memory until the request is answered, and the body must
        arrive by `HeldBody.latest_end`. With a `pace`, only the pace limits the time, and a chunk's
        bytes count until the next chunk is requested. Raises TooLarge, Overloaded, or Stalled if
        the client is too slow or disconnects.
        """
        loop, held = asyncio.get_running_loop(), held_body(self.scope)
        if pace is not None:
            check_not_compressed(self.scope)
        check_bytes(self.num_body_bytes, max_bytes)
        if pace is None:
            _check_memory(held.excess_with(max(0, self.num_body_bytes - held.num_read)))
        started_at, num_bytes, is_whole = loop.time(), 0, False
        while not is_whole:
            began = loop.time()
            latest = held.latest_end(started_at, num_bytes) if not pace else pace.latest_end(began)
            try:
                async with asyncio.timeout_at(latest):
                    message: Any = await self.receive()
            except TimeoutError:
                raise Stalled(_TOO_SLOW if pace is None else pace.excess) from None
            if message["type"] == "http.disconnect":
                raise Stalled("The client left before its request was whole.")
            chunk, is_whole = message["body"], not message.get("more_body")
            waited_s = loop.time() - began
            num_bytes += len(chunk)
            check_bytes(num_bytes, max_bytes)
            _check_memory(held.excess)
            if chunk:
                yield chunk
            if pace is not None:
                pace.add(waited_s, len(chunk))
                held.release(min(len(chunk), held.num_bytes))

    async def read(self, max_bytes: int | None) -> bytes:
        """Returns the whole body, decoded if it is compressed. `max_bytes` limits its bytes before
        and after. Raises the errors of `chunks`, UnsupportedEncoding, and Invalid if the body
        cannot be decoded."""
        decoder = None
        if find_header(self.scope, b"content-encoding") is not None:
            decoder = decoder_of_body(self.scope)
        # The chunks are joined, because small ones take many times the memory that is counted.
        body = bytearray()
        async for chunk in self.chunks(max_bytes):
            if decoder is None:
                body += chunk
            else:
                await self._decode(decoder, chunk, body, max_bytes)
        if decoder is not None:
            decoder.end()
            held_body(self.scope).release(decoder.num_state_bytes)
        return bytes(body)

    async def _decode(
        self, decoder: Decoder, chunk: bytes, body: bytearray, max_bytes: int | None
    ) -> None:
        """Adds the decoded bytes of a chunk to the body. They count as held in memory in place of
        the chunk, as does what the decoder keeps."""
        held = held_body(self.scope)
        num_state_bytes, num_decoded = decoder.num_state_bytes, 0
        for piece in decoder.decode(chunk):
            body += piece
            check_bytes(len(body), max_bytes)
            held.add(len(piece))
            held.hold(decoder.num_state_bytes - num_state_bytes)
            _check_memory(held.excess)
            num_state_bytes = decoder.num_state_bytes
            num_decoded += len(piece)
            if num_decoded >= DECODED_AT_ONCE:
                num_decoded = 0
                await asyncio.sleep(0)
        held.release(len(chunk))


class PlaneRequest(Request[U, Any, State], BodyReader):
    """Request with an id and a start time. The id is always the server's own and never taken from
    the client, because usage and changes are recorded under it."""

    def __init__(self, scope: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scope, *args, **kwargs)
        number_request(scope)

    @property
    def request_id(self) -> str:
        return self.scope["state"]["request_id"]

    def stream(
        self, max_bytes: int | None = None, pace: UploadPace | None = None
    ) -> AsyncGenerator[bytes]:
        """Yields the body as `chunks` does. If `max_bytes` is None, the route's limit applies."""
        return self.chunks(self._limit if max_bytes is None else max_bytes, pace)

    async def body(self) -> bytes:
        """Returns the whole body, within the route's limit. Raises the errors of `read`."""
        if self._body is Empty:
            self._body = await self.read(self._limit)
        return self._body

    @property
    def _limit(self) -> int | None:
        return self.route_handler.resolve_request_max_body_size()


def check_bytes(num_bytes: int, max_bytes: int | None) -> None:
    """Raises TooLarge if a body with this many bytes exceeds the limit."""
    if max_bytes is not None and num_bytes > max_bytes:
        raise TooLarge(f"The body has more than {max_bytes} bytes.")


def _check_memory(excess: Excess | None) -> None:
    """Raises Overloaded if a limit of the memory of bodies is exceeded."""
    if excess is not None:
        raise Overloaded(_EXCEEDED[excess], code="too_many_body_bytes")
