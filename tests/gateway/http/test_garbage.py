"""What a request leaves behind is freed when it ends, not when the collector of cycles comes."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.live import GatewayPlane, Live
from tests.scripted_worker import Reply
from workers.wire.protocol import ErrorCode, Generate

NUM_REQUESTS = 20
TEXT = {"model": "tiny", "prompt": "Hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
REFUSED, FAILED, ENDLESS = 2, 3, 4
"""`max_tokens` of requests to which that happens."""

KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "whole": (200, "/v1/chat/completions", CHAT),
    "streamed": (200, "/v1/completions", {**TEXT, "stream": True}),
    "no such model": (404, "/v1/completions", {**TEXT, "model": "other"}),
    "no such field": (400, "/v1/chat/completions", {**CHAT, "other": 1}),
    "refused": (503, "/v1/completions", {**TEXT, "max_tokens": REFUSED}),
    "refused, streamed": (503, "/v1/completions", {**TEXT, "max_tokens": REFUSED, "stream": True}),
    "failed": (500, "/v1/completions", {**TEXT, "max_tokens": FAILED}),
    "failed half way": (200, "/v1/completions", {**TEXT, "max_tokens": FAILED, "stream": True}),
}


def script(request: Generate) -> Reply:
    replies = {
        REFUSED: Reply([], failure=ErrorCode.OVERLOADED),
        FAILED: Reply([65, 66], failure=ErrorCode.INTERNAL),
        ENDLESS: Reply([65], never_ends=True),
    }
    return replies.get(request.params.max_tokens, Reply([65, 66, 67]))


class Connection:
    """A client that makes no garbage of its own."""

    def __init__(self, plane: GatewayPlane, key: str) -> None:
        self._host = urlsplit(str(plane.client.base_url)).netloc
        self._key = key

    async def __aenter__(self) -> Connection:
        host, _, port = self._host.partition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    def send(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body)
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()
        )

    async def begun(self) -> None:
        """Its first event is here."""
        await self._reader.readuntil(b"data: ")

    async def status(self) -> int:
        """Of an answer, once all of it is here."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            await self._reader.readexactly(int(fields[b"content-length"]))
        else:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return int(head.split()[1])


@pytest.fixture(autouse=True)
def only_what_is_new() -> Iterator[None]:
    """To look through all that the suite has imported takes the collector a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def in_cycles() -> Counter[str]:
    """What lies in circles, by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(type(each).__name__ for each in gc.garbage)
    gc.garbage.clear()
    return found


async def test_no_cycles(live: Live) -> None:
    """Half an object a request is for what the gateway does by itself meanwhile."""
    live.worker.script = script
    async with (
        live.worker,
        live.gateway() as plane,
        Connection(plane, live.key) as connection,
    ):
        for kind, (expected, path, body) in KINDS.items():

            async def ask(expected: int = expected, path: str = path, body: Any = body) -> None:
                connection.send(path, body)
                assert await connection.status() == expected

            await ask()
            gc.collect()
            gc.disable()
            try:
                for _ in range(NUM_REQUESTS):
                    await ask()
                found = in_cycles()
            finally:
                gc.enable()
            assert found.total() < NUM_REQUESTS / 2, (kind, found)


@pytest.mark.full
async def test_no_cycles_of_who_leaves(live: Live) -> None:
    live.worker.script = script
    body = {**TEXT, "max_tokens": ENDLESS, "stream": True}
    async with live.worker, live.gateway() as plane:
        found = Counter[str]()
        for number in range(NUM_REQUESTS):
            async with Connection(plane, live.key) as connection:
                connection.send("/v1/completions", body)
                await connection.begun()
            while len(live.worker.aborted) <= number:
                await asyncio.sleep(0.01)
            if number == 0:
                gc.collect()
                gc.disable()
        try:
            found = in_cycles()
        finally:
            gc.enable()
        # Each end of a connection of asyncio's own is a circle.
        assert not found.keys() & {"HttpRequest", "Generation", "Task", "frame"}, found
