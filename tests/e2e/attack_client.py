"""`python -m tests.e2e.attack_client < ORDER`: sends requests to a gateway until SIGTERM, and then
prints what it was answered. It is a process of its own, so that its work is not measured with the
answers to others and its share of the processor can be held down."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from loraplex.death import die_with_parent

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


class Answers(msgspec.Struct):
    """Answers that the clients got."""

    statuses: dict[int, int] = {}
    codes: dict[str, int] = {}
    num_cut: int = 0
    """Connections that were closed without an answer."""

    def add(self, status: int, code: str) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.codes[code] = self.codes.get(code, 0) + 1

    @property
    def num_refused(self) -> int:
        return sum(self.statuses.values()) - self.statuses.get(200, 0)


class AttackClient:
    """Connection that is opened again when it is closed."""

    def __init__(self, order: Order, answers: Answers) -> None:
        parts = urlsplit(order.url)
        assert parts.hostname is not None and parts.port is not None
        self._address = parts.hostname, parts.port
        attack = order.attack
        headers = {"host": parts.netloc, **attack.headers}
        if order.key:
            headers["authorization"] = f"Bearer {order.key}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"{attack.method} {attack.path} HTTP/1.1\r\n{lines}"
        self._body = attack.body
        self._reads = attack.reads
        self._answers = answers
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes | None = None) -> tuple[int, float]:
        """Sends the attack's body or another. Returns the status and the seconds that the answer
        says to wait; the status is 0 if the connection is closed without an answer. A client that
        does not read waits until the connection is closed."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ask(self._body if body is None else body)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self._answers.num_cut += 1
            self.close()
            return 0, 0.0

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self, body: bytes) -> tuple[int, float]:
        if self._streams is None:
            self._streams = await self._open()
        reader, writer = self._streams
        writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        status, code = int(first.split()[1]), ""
        if self._reads or status != 200:
            answer = await reader.readexactly(int(headers.get("content-length", 0)))
            if status != 200 and answer:
                code = msgspec.json.decode(answer)["error"]["code"] or "bad"
        else:
            # The reader is paused, and lets the socket's buffer fill up.
            await asyncio.sleep(UNREAD_S)
        self._answers.add(status, code)
        if headers.get("connection") == "close" or not self._reads:
            self.close()
        return status, float(headers.get("retry-after-ms", 0)) / 1e3

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if not self._reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        # A reader that is not read from pauses its transport after twice this limit.
        return await asyncio.open_connection(sock=sock, limit=RECEIVE_BUFFER)


async def run(order: Order) -> Answers:
    """Sends requests on whichever connections are free, until SIGTERM."""
    answers = Answers()
    idle = [AttackClient(order, answers) for _ in range(order.attack.num_connections)]
    asking: set[asyncio.Task[None]] = set()
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()

    async def ask(client: AttackClient) -> None:
        await client.ask()
        idle.append(client)

    next_s = loop.time()
    while not ending.is_set():
        if idle:
            task = asyncio.create_task(ask(idle.pop()))
            asking.add(task)
            task.add_done_callback(asking.discard)
        next_s += 1 / order.attack.per_s
        await asyncio.sleep(next_s - loop.time())
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return answers


@asynccontextmanager
async def attacking(order: Order) -> AsyncIterator[tuple[Answers, Process]]:
    """Attacks from a process of its own. The answers are there at the end."""
    answers = Answers()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.e2e.attack_client"),
        stdin=PIPE,
        stdout=PIPE,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.write_eof()
        # A SIGTERM before it has begun would end it without its answers.
        assert await process.stdout.readline() == BEGUN
        yield answers, process
    finally:
        process.terminate()
        told, _ = await process.communicate()
    found = msgspec.json.decode(told, type=Answers)
    answers.statuses, answers.codes, answers.num_cut = found.statuses, found.codes, found.num_cut


if __name__ == "__main__":
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(order))))
