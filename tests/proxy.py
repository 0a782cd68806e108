"""Between clients and a server: what they say to each other comes late, slowly, or not at all.

Addresses are `unix:/path` or `tcp://127.0.0.1:port`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args
from urllib.parse import quote, unquote

Toward = Literal["server", "client"]
RESETS = struct.pack("ii", 1, 0)
"""SO_LINGER: a TCP connection that is aborted is reset."""


def everything(_said: bytearray) -> bool:
    return True


def nothing(_said: bytearray) -> bool:
    return False


@dataclass(frozen=True)
class Way:
    """What happens to that which is sent in one direction."""

    delay_s: float = 0.0
    bytes_per_s: float = math.inf
    swallows: Callable[[bytearray], bool] = nothing
    """Whether a connection carries nothing from then on, of a client that has said all this."""


class Proxy:
    """`async with Proxy(address, target)`: clients connect to `address`. What is set applies to
    connections that are open too."""

    def __init__(self, address: str, target: str) -> None:
        """address: may have the TCP port 0, and has the true one afterwards."""
        self.address = address
        self.ways: dict[Toward, Way] = {"server": Way(), "client": Way()}
        self.said = bytearray()
        """By all clients."""
        self.target = target
        self._connections: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def set_both(self, way: Way) -> None:
        self.ways = {"server": way, "client": way}

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nobody can connect meanwhile, and who was connected is not."""
        await self._close()
        try:
            yield
        finally:
            await self._open()

    def reset(self) -> None:
        """Breaks all connections, whatever is under way."""
        for connection in self._connections:
            connection.reset()

    def half_close(self, toward: Toward) -> None:
        """Ends one direction of all connections; the other stays open."""
        for connection in self._connections:
            connection.passages[toward].end()

    async def _open(self) -> None:
        self._server, self.address = await _listen(self.address, self._accept)

    async def _close(self) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*(c.task for c in self._connections), return_exceptions=True)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            their_reader, their_writer = await _connect(self.target)
        except OSError:
            writer.close()
            return
        said = bytearray()

        def hear(data: bytes) -> None:
            said.extend(data)
            self.said.extend(data)

        connection = _Connection(
            _Passage(reader, their_writer, lambda: self.ways["server"], said, hear),
            _Passage(their_reader, writer, lambda: self.ways["client"], said),
        )
        self._connections.add(connection)
        try:
            await asyncio.wait([connection.task])
        finally:
            self._connections.discard(connection)


TOWARDS: tuple[Toward, ...] = get_args(Toward)
FAULTS: dict[str, Callable[[Proxy, Toward], None]] = {
    "delay": lambda proxy, toward: proxy.ways.update({toward: Way(delay_s=0.5)}),
    "swallow": lambda proxy, toward: proxy.ways.update({toward: Way(swallows=everything)}),
    "trickle": lambda proxy, toward: proxy.ways.update({toward: Way(bytes_per_s=1)}),
    "reset": lambda proxy, _: proxy.reset(),
    "half-close": lambda proxy, toward: proxy.half_close(toward),
}
"""What a network does. To be done again and again for as long as it does; `set_both(Way())` ends
it."""


class PostgresProxy(Proxy):
    """In front of a Postgres server on a Unix socket; clients connect to `dsn`."""

    def __init__(self, dsn: str, folder: Path) -> None:
        name = ".s.PGSQL.5432"
        head, _, host = dsn.rpartition("?host=")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(f"unix:{folder / name}", f"unix:{Path(unquote(host)) / name}")
        self.dsn = f"{head}?host={quote(str(folder))}"


class _Passage:
    """One direction of one connection. Each part travels for the delay that holds when it came."""

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        way: Callable[[], Way],
        said: bytearray,
        hear: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """said: by the connection's client so far; `hear` is told what is read."""
        self.writer = writer
        self._reader = reader
        self._way = way
        self._said = said
        self._hear = hear
        self._now = asyncio.get_running_loop().time
        self._underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    def end(self) -> None:
        self._underway.put_nowait((self._now() + self._way().delay_s, b""))

    async def collect(self) -> None:
        """Returns when the sender has ended, which is never swallowed."""
        is_swallowed = False
        while data := await self._reader.read(1 << 16):
            self._hear(data)
            way = self._way()
            is_swallowed = is_swallowed or way.swallows(self._said)
            if not is_swallowed:
                self._underway.put_nowait((self._now() + way.delay_s, data))
        self.end()

    async def deliver(self) -> None:
        while True:
            due, data = await self._underway.get()
            await asyncio.sleep(due - self._now())
            if not data:
                self.writer.write_eof()
                return
            while data:
                data = await self._write_some(data)

    async def _write_some(self, data: bytes) -> bytes:
        """What is left of it."""
        pause_s = 1 / self._way().bytes_per_s
        part = data[:1] if pause_s else data
        self.writer.write(part)
        await self.writer.drain()
        await asyncio.sleep(pause_s)
        return data[len(part) :]


class _Connection:
    def __init__(self, to_server: _Passage, to_client: _Passage) -> None:
        self.passages: dict[Toward, _Passage] = {"server": to_server, "client": to_client}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Until both directions have ended, or one broke."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for passage in self.passages.values():
                    tasks.create_task(passage.collect())
                    tasks.create_task(passage.deliver())
        except* OSError:
            self._abort()
        finally:
            for passage in self.passages.values():
                passage.writer.close()

    def reset(self) -> None:
        self._abort()
        self.task.cancel()

    def _abort(self) -> None:
        for passage in self.passages.values():
            if not passage.writer.is_closing():
                ours: socket.socket = passage.writer.get_extra_info("socket")
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            passage.writer.transport.abort()


Accept = Callable[[StreamReader, StreamWriter], Awaitable[None]]


async def _listen(address: str, accept: Accept) -> tuple[asyncio.Server, str]:
    """And the true address."""
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        Path(place).unlink(missing_ok=True)
        return await asyncio.start_unix_server(accept, place), address
    server = await asyncio.start_server(accept, "127.0.0.1", int(place.rpartition(":")[2]))
    return server, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _connect(address: str) -> tuple[StreamReader, StreamWriter]:
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        return await asyncio.open_unix_connection(place)
    return await asyncio.open_connection("127.0.0.1", int(place.rpartition(":")[2]))
