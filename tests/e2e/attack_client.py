"""`python -m tests.e2e.attack_client < ATTACK`: sends requests to a gateway until SIGTERM, and then
prints the statuses of its answers. It is a process of its own, so that its share of the processor
can be held down."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections import Counter
from urllib.parse import urlsplit

import msgspec

BEGUN = b"begun\n"
"""Line that it prints before its first request."""
RECEIVE_BUFFER = 4096
"""Bytes of the receive buffer of a client that does not read."""
ANSWER_S = 60.0
"""Maximum seconds that it waits for an answer."""
UNREAD_S = 45.0
"""Seconds for which a client that does not read keeps its connection, unless it is cut."""


class Attack(msgspec.Struct, frozen=True):
    """Requests that one client repeats."""

    name: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = {}
    method: str = "POST"
    per_s: float = 50.0
    """Requests per second, as long as connections are free."""
    num_connections: int = 16
    reads: bool = True
    """Whether the client reads more than the head of an answer."""

    @property
    def tenant(self) -> str:
        """Name of the tenant that attacks."""
        return self.name.replace(" ", "-").replace(",", "").lower()[:32].rstrip("-")


class Order(msgspec.Struct, frozen=True):
    """Order to the process: an attack on the gateway at a URL, with a key or without one."""

    url: str
    key: str
    attack: Attack


class _Connection:
    """Connection that is opened again when it is closed."""

    def __init__(self, order: Order) -> None:
        parts = urlsplit(order.url)
        assert parts.hostname is not None and parts.port is not None
        self._address = parts.hostname, parts.port
        attack = order.attack
        headers = {"host": parts.netloc, "content-length": str(len(attack.body)), **attack.headers}
        if order.key:
            headers["authorization"] = f"Bearer {order.key}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._request = f"{attack.method} {attack.path} HTTP/1.1\r\n{lines}\r\n".encode()
        self._request += attack.body
        self._reads = attack.reads
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> int:
        """Returns the status of the answer, or 0 if the connection is closed without one. A client
        that does not read waits until the connection is closed."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ask()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self.close()
            return 0

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self) -> int:
        if self._streams is None:
            self._streams = await self._open()
        reader, writer = self._streams
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split()[1])
        if self._reads or status != 200:
            _, _, length = head.partition(b"content-length: ")
            await reader.readexactly(int(length.split(b"\r\n")[0] or 0))
        else:
            # The reader is paused, and lets the socket's buffer fill up.
            await asyncio.sleep(UNREAD_S)
        if b"connection: close" in head or not self._reads:
            self.close()
        return status

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if not self._reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        # A reader that is not read from pauses its transport after twice this limit.
        return await asyncio.open_connection(sock=sock, limit=RECEIVE_BUFFER)


async def run(order: Order) -> Counter[int]:
    """Sends requests on whichever connections are free, until SIGTERM."""
    statuses: Counter[int] = Counter()
    idle = [_Connection(order) for _ in range(order.attack.num_connections)]
    asking: set[asyncio.Task[None]] = set()
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()

    async def ask(connection: _Connection) -> None:
        statuses[await connection.ask()] += 1
        idle.append(connection)

    while not ending.is_set():
        if idle:
            task = asyncio.create_task(ask(idle.pop()))
            asking.add(task)
            task.add_done_callback(asking.discard)
        await asyncio.sleep(1 / order.attack.per_s)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return statuses


if __name__ == "__main__":
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(order))))
