"""Bodies of both planes: bounded in bytes, memory and time while they are read."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from web.errors import Overloaded, Stalled, TooLarge
from web.held_bytes import HELD_BODY, BodyBudget, HeldBody
from web.request import PlaneRequest, UploadPace


class Client:
    """Client whose body comes in these chunks. Ends with None if it then sends nothing more."""

    def __init__(
        self, chunks: Iterable[bytes | None], budget: BodyBudget | None = None, coding: str = ""
    ) -> None:
        """`coding` is the body's content coding."""
        self._headers = [(b"content-encoding", coding.encode())] if coding else []
        self._chunks = [*chunks]
        self.num_received = 0
        self.held = HeldBody(budget or BodyBudget())
        self.held.charge("ten_1")

    def request(self, announced: int | None = None) -> PlaneRequest[Any]:
        length = [] if announced is None else [(b"content-length", b"%d" % announced)]
        headers = [*self._headers, *length]
        scope = {"type": "http", "headers": headers, "state": {HELD_BODY: self.held}}
        return PlaneRequest[Any](scope, self._receive)

    async def _receive(self) -> Any:
        self.num_received += 1
        if not self._chunks:
            return {"type": "http.disconnect"}
        chunk = self._chunks.pop(0)
        if chunk is None:
            await asyncio.Event().wait()
            raise AssertionError
        self.held.add(len(chunk))
        more = bool(self._chunks) or chunk == b"cut"
        return {"type": "http.request", "body": chunk, "more_body": more}


async def body_of(request: PlaneRequest[Any], *args: Any) -> bytes:
    return b"".join([chunk async for chunk in request.stream(*args)])


async def test_a_whole_body_stays_held() -> None:
    client = Client([b"ab", b"", b"cd"])
    assert await body_of(client.request(), 4) == b"abcd"
    assert client.held.num_bytes == 4


async def test_a_body_in_small_chunks_takes_little_more_memory_than_its_bytes() -> None:
    numbers = iter(range(10_000))

    async def receive() -> Any:
        await asyncio.sleep(0)
        number = next(numbers)
        return {"type": "http.request", "body": b"%04d" % number, "more_body": number < 9_999}

    request = PlaneRequest[Any]({"type": "http", "headers": [], "state": {}}, receive)
    tracemalloc.start()
    try:
        assert len(await request.read(40_000)) == 40_000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


async def test_an_upload_holds_one_chunk_at_a_time() -> None:
    client = Client([b"ab", b"cde"])
    async for chunk in client.request().stream(5, UploadPace(60, 1)):
        assert client.held.num_bytes == len(chunk)
    assert client.held.num_bytes == 0


@pytest.mark.parametrize("announced", [5, None])
async def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(
    announced: int | None,
) -> None:
    client = Client([b"ab", b"cde", b"f"])
    with pytest.raises(TooLarge, match="more than 4 bytes"):
        await body_of(client.request(announced), 4)
    assert client.num_received == (0 if announced else 2)


@pytest.mark.parametrize("announced", [5, None])
async def test_a_body_without_room_in_memory_is_refused_as_soon_as_that_is_known(
    announced: int | None,
) -> None:
    client = Client([b"ab", b"cde", b"f"], BodyBudget(max_bytes=8 * 4))
    with pytest.raises(Overloaded, match="this tenant's requests"):
        await body_of(client.request(announced), 100)
    assert client.num_received == (0 if announced else 2)


@pytest.mark.parametrize(
    ("chunks", "pace", "message"),
    [
        ([b"ab", None], None, "too slowly"),
        ([b"ab", None], UploadPace(0.01, 1000), "Fewer than 10 bytes came in 0.01 s"),
        ([b"cut"], None, "left before"),
        ([b"cut"], UploadPace(60, 1), "left before"),
    ],
)
async def test_clients_that_stop_sending_are_refused(
    chunks: list[bytes | None], pace: UploadPace | None, message: str
) -> None:
    client = Client(chunks, BodyBudget(grace_s=0.01))
    with pytest.raises(Stalled, match=message):
        await body_of(client.request(), 100, pace)


def test_the_pace_of_an_upload_counts_only_waiting() -> None:
    pace = UploadPace(10, 2)
    pace.add(4, 19)
    assert pace.latest_end(100) == 106
    pace.add(5, 1)
    assert pace.latest_end(100) == 110


async def test_requests_are_numbered_by_the_server() -> None:
    first, second = (Client([]).request() for _ in range(2))
    assert first.request_id.startswith("req_") and first.request_id != second.request_id
