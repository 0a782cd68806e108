"""`python -m tests.e2e.flood_client URL KEY PER_S < BODY`: sends a request so many times a second,
until SIGTERM, and prints what it was told. It is a process of its own, so that its work is not
measured with the answers to others."""

from __future__ import annotations

import asyncio
import signal
import sys
from urllib.parse import urlsplit

import msgspec

NUM_CONNECTIONS = 100
BEGUN = b"begun\n"
"""Line that it prints when it sends its first request."""


class Answers(msgspec.Struct):
    """What the clients of a flood were told."""

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


class FloodClient:
    """Sends requests on one connection, which it opens again if it is closed."""

    def __init__(self, url: str, key: str, answers: Answers) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        )
        self._answers = answers
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> tuple[int, float]:
        """The status, and the seconds that it says to wait; 0 of an answer that was cut."""
        try:
            return await self._ask(body)
        except (OSError, asyncio.IncompleteReadError):
            self._answers.num_cut += 1
            self.close()
            return 0, 0.0

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, body: bytes) -> tuple[int, float]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        status = int(first.split()[1])
        code = "" if status == 200 else msgspec.json.decode(answer)["error"]["code"] or "bad"
        self._answers.add(status, code)
        return status, float(headers.get("retry-after-ms", 0)) / 1e3


async def flood(url: str, key: str, per_s: float, body: bytes) -> Answers:
    """Sends the request on whichever connections are free."""
    answers = Answers()
    clients = [FloodClient(url, key, answers) for _ in range(NUM_CONNECTIONS)]
    idle, asking = list(clients), set[asyncio.Task[None]]()
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()

    async def ask(client: FloodClient) -> None:
        await client.ask(body)
        idle.append(client)

    next_s = loop.time()
    while not ending.is_set():
        if idle:
            task = asyncio.create_task(ask(idle.pop()))
            asking.add(task)
            task.add_done_callback(asking.discard)
        next_s += 1 / per_s
        await asyncio.sleep(next_s - loop.time())
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return answers


if __name__ == "__main__":
    told = asyncio.run(flood(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.stdin.buffer.read()))
    sys.stdout.buffer.write(msgspec.json.encode(told))
