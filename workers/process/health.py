"""HTTP server of a worker for /livez, /readyz and documents such as /metrics. Answers one GET per
connection."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from pathlib import Path

from workers.wire.transport.stream import bind_private
from workers.wire.transport.tls import bind

MAX_HEAD_BYTES = 8 << 10
TIMEOUT_S = 5.0
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
REASONS |= {503: "Service Unavailable"}


class HealthServer:
    """HTTP server on the event loop that also handles the gateways' frames, so that an answer of
    /livez proves that this event loop runs."""

    def __init__(
        self,
        address: str,
        *,
        why_not_ready: Callable[[], str | None],
        documents: Mapping[str, Callable[[], bytes]],
    ) -> None:
        """address: HOST:PORT or `unix:PATH`. why_not_ready: function that returns the reason why
        the worker is not ready, for /readyz, or None if it is ready. documents: map from a path,
        such as /metrics, to a function that makes its document and is called on another thread."""
        self.address = address
        self._why_not_ready = why_not_ready
        self._documents = documents
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Starts to listen. After that, `address` has the actual port."""
        if self.address.startswith("unix:"):
            sock = bind_private(Path(self.address.removeprefix("unix:")))
            self._server = await asyncio.start_unix_server(
                self._serve, sock=sock, limit=MAX_HEAD_BYTES
            )
            return
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(
            self._serve, sock=bind(host.strip("[]"), int(port)), limit=MAX_HEAD_BYTES
        )
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(*await self._answer(head)))
                await writer.drain()
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            writer.write(_response(400, b"not a request of at most 8 KiB\n"))
        except (TimeoutError, OSError):
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> tuple[int, bytes]:
        method, _, rest = head.partition(b" ")
        target, _, version = rest.partition(b"\r\n")[0].partition(b" ")
        if not version.startswith(b"HTTP/1."):
            return 400, b"not HTTP/1\n"
        if method != b"GET":
            return 405, b"GET only\n"
        match target.partition(b"?")[0]:
            case b"/livez":
                return 200, b"ok\n"
            case b"/readyz":
                reason = self._why_not_ready()
                return (200, b"ok\n") if reason is None else (503, f"{reason}\n".encode())
            case path:
                document = self._documents.get(path.decode("latin-1"))
                if document is None:
                    return 404, b"not found\n"
                # Making a document takes milliseconds, which would delay the gateways' frames.
                return 200, await asyncio.to_thread(document)


def _response(status: int, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\n"
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
