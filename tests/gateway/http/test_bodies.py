"""Bodies that do not end: bounded in bytes for a tenant and in all, and in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from gateway.text.long_texts import LONG, LongTexts
from gateway.text.tokenizer import MANY_MESSAGES
from tests.gateway.live import GatewayPlane, Live
from tests.waiting import eventually
from web.held_bytes import GRACE_S, MIN_BYTES_PER_S, BodyBudget, HeldBody

TENANT_BYTES = 1 << 20
BUDGET = 8 * TENANT_BYTES
PART = 400 << 10
WHOLE = json.dumps({"model": "bot", "prompt": "Hi", "max_tokens": 3}).ljust(PART + 100).encode()
"""A request whose body is mostly white space."""


class Slow:
    """A request over a socket, body and answer at the test's own pace."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes, dict[str, str]]:
        """Status, head, and the error of the body if it is one."""
        async with asyncio.timeout(20):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await self._reader.readexactly(length))
        return int(head.split()[1]), head, body.get("error")


@asynccontextmanager
async def posting(
    plane: GatewayPlane, key: str, path: str = "/v1/completions", length: int = len(WHOLE)
) -> AsyncIterator[Slow]:
    """With the head sent."""
    url = plane.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    slow = Slow(reader, writer)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
    await slow.send(f"{head}content-length: {length}\r\n\r\n".encode())
    yield slow
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_tenants_unfinished_bodies_are_bounded(live: Live) -> None:
    """The third exceeds the tenant's part and is refused; the first two end as if it had not been,
    and so does one that comes when there is room again."""
    await live.make_ready("1")
    budget = BodyBudget(BUDGET)
    async with live.worker, live.gateway(bodies=budget) as plane, AsyncExitStack() as stack:
        requests = [await stack.enter_async_context(posting(plane, live.key)) for _ in range(3)]
        for number, request in enumerate(requests[:2], 1):
            await request.send(WHOLE[:PART])
            await eventually(lambda n=number: budget.num_bytes == n * PART)
        await requests[2].send(WHOLE[:PART])
        status, head, error = await requests[2].answer()
        assert (status, error["code"]) == (503, "too_many_body_bytes")
        assert b"retry-after: " in head
        assert budget.num_bytes == 2 * PART
        for request in requests[:2]:
            await request.send(WHOLE[PART:])
            assert (await request.answer())[0] == 200
        assert (await plane.complete("bot")).status_code == 200
        assert budget.num_bytes == budget.num_unowned_bytes == 0


async def test_a_body_that_has_no_room_is_refused_before_it_comes(live: Live) -> None:
    budget = BodyBudget(BUDGET)
    async with live.worker, live.gateway(bodies=budget) as plane:
        async with posting(plane, live.key) as held, posting(plane, live.key) as refused:
            await held.send(WHOLE[:PART])
            await eventually(lambda: budget.num_bytes == PART)
            async with posting(plane, live.key, length=TENANT_BYTES) as large:
                status, _, error = await large.answer()
                assert (status, error["code"]) == (503, "too_many_body_bytes")
            await refused.send(WHOLE)
            assert (await refused.answer())[0] == 404
        await eventually(lambda: budget.num_bytes == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_a_text_that_waits_to_be_tokenised_is_held(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts towards the tenant's part until then."""
    may_begin = asyncio.Event()
    run = LongTexts.run

    async def wait(self: LongTexts, domain: str, work: Callable[[], Any]) -> Any:
        await may_begin.wait()
        return await run(self, domain, work)

    monkeypatch.setattr(LongTexts, "run", wait)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fields: dict[str, Any] = {"messages": messages * (MANY_MESSAGES // 2 + 1), "max_tokens": 1}
    if path == "/tokenize":
        fields = {"prompt": "a " * (LONG // 2 + 1)}
    body = json.dumps({"model": "tiny", **fields}).encode()
    budget = BodyBudget(8 * 2 * len(body))
    async with live.worker, live.gateway(bodies=budget) as plane:
        asking = [asyncio.create_task(plane.client.post(path, content=body)) for _ in range(2)]
        await eventually(lambda: budget.num_bytes == 2 * len(body))
        refused = await plane.client.post(path, content=body)
        assert "Too many bytes of this tenant" in refused.text
        may_begin.set()
        answers = await asyncio.gather(*asking)
        assert budget.num_bytes == 0
    assert {answer.status_code for answer in answers} < {200, 400}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tokenize"])
async def test_large_bodies_wait_for_their_turn(live: Live, path: str) -> None:
    asked: list[tuple[str, int]] = []

    def delay_s(tenant_id: str, num_bytes: int) -> float:
        asked.append((tenant_id, num_bytes))
        return 0.001

    async with live.worker, live.gateway() as plane:
        plane.gateway.body_pace.delay_s = delay_s
        await plane.client.post(path, content=WHOLE)
    assert asked == [(live.tenant_id, len(WHOLE))]


async def test_a_client_that_leaves_gives_its_bytes_back(live: Live) -> None:
    budget = BodyBudget(BUDGET)
    async with live.worker, live.gateway(bodies=budget) as plane:
        async with posting(plane, live.key) as request:
            await request.send(WHOLE[:PART])
            await eventually(lambda: budget.num_bytes == PART)
        await eventually(lambda: budget.num_bytes == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nothing"])
async def test_no_body_is_held_before_its_key_is_known(live: Live, path: str) -> None:
    """The answer comes though the body never does, and of what comes later nothing is kept."""
    budget = BodyBudget(BUDGET)
    async with (
        live.worker,
        live.gateway(bodies=budget) as plane,
        posting(plane, "lpx_wrong", path, 5 << 20) as request,
    ):
        assert (await request.answer())[0] == (404 if path == "/nothing" else 401)
        await request.send(bytes(4 << 20))
        assert (await plane.client.get("/v1/models")).status_code == 200
        assert budget.num_bytes == budget.num_unowned_bytes == 0


async def test_a_body_that_trickles_has_a_deadline(live: Live) -> None:
    """However steadily it comes."""
    budget = BodyBudget(BUDGET, grace_s=0.5)
    async with (
        live.worker,
        live.gateway(bodies=budget) as plane,
        posting(plane, live.key) as request,
    ):
        answered = asyncio.create_task(request.answer())
        while not answered.done():
            await request.send(b" ")
            await asyncio.wait([answered], timeout=0.1)
        status, _, error = await answered
        assert (status, error["code"]) == (408, "request_timeout")
        assert budget.num_bytes == 0


def test_the_deadline_grows_with_what_came() -> None:

    body = HeldBody(BodyBudget())
    assert body.latest_end(7.0, 0) == 7.0 + GRACE_S
    assert body.latest_end(7.0, 10 * MIN_BYTES_PER_S) == 7.0 + GRACE_S + 10


def test_all_tenants_bodies_are_bounded_together() -> None:

    budget = BodyBudget(BUDGET)
    bodies = [HeldBody(budget) for _ in range(9)]
    for number, body in enumerate(bodies):
        body.add(TENANT_BYTES)
        body.charge(f"ten_{number}")
    assert budget.num_unowned_bytes == 0
    assert {body.excess for body in bodies} == {"all"}
    bodies[0].release()
    assert {body.excess for body in bodies} == {None}
    bodies[1].add(1)
    bodies[0].charge("ten_1")
    assert bodies[1].excess == bodies[0].excess == "tenant"
