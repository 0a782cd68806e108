"""Between a client and a Postgres server, on a Unix socket: passes on, delays, swallows, and keeps
what clients said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, unquote

NAME = ".s.PGSQL.5432"


class Proxy:
    """`async with Proxy(dsn, folder) as proxy`; clients connect to `proxy.dsn`. What is set applies
    to connections that are open too."""

    def __init__(self, dsn: str, folder: Path) -> None:
        head, _, host = dsn.rpartition("?host=")
        self.dsn = f"{head}?host={quote(str(folder))}"
        self.delay_s = 0.0
        """Of everything, in both directions."""
        self.swallows: Callable[[bytes], bool] = lambda _: False
        """Whether a client that has said all this hears nothing from then on."""
        self.said = bytearray()
        """By all clients."""
        self._target = str(Path(unquote(host)) / NAME)
        self._path = folder / NAME
        self._ways: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nobody can connect meanwhile, and who was connected is not."""
        await self._close()
        try:
            yield
        finally:
            await self._open()

    def cut(self) -> None:
        """All connections, at once."""
        for way in self._ways:
            way.cancel()

    async def _open(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def _close(self) -> None:
        self._server.close()
        ways = list(self._ways)
        self.cut()
        await asyncio.gather(*ways, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        said = bytearray()

        def hear(data: bytes) -> bool:
            said.extend(data)
            self.said.extend(data)
            return True

        ways = [
            asyncio.create_task(self._pass(reader, their_writer, hear)),
            asyncio.create_task(
                self._pass(their_reader, writer, lambda _: not self.swallows(bytes(said)))
            ),
        ]
        self._ways.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._ways.difference_update(ways)
        writer.close()
        their_writer.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wanted: Callable[[bytes], bool],
    ) -> None:
        """Until either end closes. Each part travels for the delay that holds when it came."""
        loop = asyncio.get_running_loop()
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await underway.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        async def collect() -> None:
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                if not data or wanted(data):
                    underway.put_nowait((loop.time() + self.delay_s, data))

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(deliver())
                tasks.create_task(collect())
        except* ConnectionError:
            pass
