"""Refused requests have a limit of their own. A tenant that has used it up is refused before a body
is read, and no other tenant is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from admin.keys import keys
from gateway.exceptions import TooManyRefusals
from gateway.http import request as http_request
from gateway.limits.tenant_load import (
    BURST_S,
    MAX_DEBT_S,
    MAX_DELAY_S,
    UNIT_BYTES,
    UNREAD_BURST_S,
    UNREAD_BYTES_PER_S,
    UNREAD_PER_S,
    RefusalLimit,
)
from store.records import TENANT_SCOPES
from tests.admin.lifecycle import make_tenant
from tests.gateway.http.test_bodies import posting
from tests.gateway.limits.test_quotas import limited
from tests.gateway.limits.test_request_charge import CALLS, ON_WORKER, call
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.pepper import PEPPER
from tests.scripted_worker import Reply
from tests.waiting import eventually
from web.held_bytes import BodyBudget
from workers.wire.protocol import ErrorCode

MANY = 5
MIB = 1 << 20
PATH = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 3}).encode()


class Setup:
    """A limit of 60 refusals a minute, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.limit = RefusalLimit(60, lambda: self.now)

    def refused_for(self, tenant: str = "a", num_bytes: int = 0) -> float:
        """Seconds that a request is told to wait; 0: it is begun."""
        try:
            self.limit.begin(tenant, num_bytes)
        except TooManyRefusals as error:
            return error.retry_after_s
        return 0.0

    def refuse(self, num_bytes: int = 0, tenant: str = "a") -> bool:
        """Refuses a request after it is read. Returns whether it could begin."""
        if self.refused_for(tenant, num_bytes):
            return False
        self.limit.end(tenant, num_bytes, num_bytes)
        return True


def test_a_minute_s_refusals_may_come_at_once_and_come_back_one_by_one() -> None:
    setup = Setup()
    assert [setup.refuse() for _ in range(61)] == [True] * 60 + [False]
    assert setup.refused_for() == pytest.approx(1.0)
    assert not setup.refused_for("b")
    setup.now += 1.0
    assert setup.refuse() and not setup.refuse()


def test_bytes_count_as_refusals() -> None:
    setup = Setup()
    assert [setup.refuse(9 * UNIT_BYTES) for _ in range(7)] == [True] * 6 + [False]
    setup.now += 1.0
    # Of this one, too, no more is known before it is read.
    assert setup.refuse(9 * UNIT_BYTES)
    assert setup.refused_for() == pytest.approx(10.0)


def test_what_is_served_counts_for_nothing_however_much_is_in_flight() -> None:
    setup = Setup()
    for _ in range(10):
        assert not any(setup.refused_for(num_bytes=MIB) for _ in range(1000))
        for _ in range(1000):
            setup.limit.end("a", MIB, None)
    assert setup.refuse()


def test_a_length_beyond_the_precision_of_floats_is_counted_exactly() -> None:
    """Or the requests beside it would end more often than they began."""
    setup = Setup()
    setup.limit.begin("a", (1 << 64) - 1)
    for _ in range(100):
        setup.limit.begin("a", 1000)
    setup.limit.end("a", (1 << 64) - 1, 0)
    for _ in range(100):
        setup.limit.end("a", 1000, None)


def test_of_a_tenant_that_was_refused_often_no_more_are_begun_than_may_be_refused() -> None:
    """Those that are served make room for others at once."""
    setup = Setup()
    for _ in range(50):
        setup.refuse()
    assert [bool(setup.refused_for()) for _ in range(12)] == [False] * 10 + [True] * 2
    setup.limit.end("a", 0, None)
    assert not setup.refused_for() and setup.refused_for()
    setup.limit.end("a", 0, 0)
    assert setup.refused_for() == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 10 * MIB)), max_size=60))
def test_no_tenant_waits_longer_than_its_debt(uses: list[tuple[float, int]]) -> None:
    setup = Setup()
    for pause_s, num_bytes in uses:
        setup.now += pause_s
        setup.refuse(num_bytes)
        # What is begun here stays in flight.
        assert setup.refused_for() <= MAX_DEBT_S
    setup.now += BURST_S + MAX_DEBT_S
    assert not setup.refused_for()


def test_refusals_before_the_body_is_read_are_answered_in_turn() -> None:
    """Those beyond a burst wait, each a little longer, until it would be too long."""
    setup = Setup()
    at_once = {setup.limit.delay_s("a") for _ in range(round(UNREAD_PER_S * UNREAD_BURST_S))}
    assert at_once == {0.0}
    num_waiting = round(MAX_DELAY_S * UNREAD_PER_S)
    delays = [setup.limit.delay_s("a") for _ in range(num_waiting - 1)]
    assert delays == pytest.approx([each / UNREAD_PER_S for each in range(1, num_waiting)])
    assert MAX_DELAY_S in {setup.limit.delay_s("a") for _ in range(3)}
    assert setup.limit.delay_s("b") == 0.0
    setup.now += MAX_DELAY_S + UNREAD_BURST_S
    assert setup.limit.delay_s("a") == 0.0


def test_bytes_that_are_thrown_away_make_the_next_refusals_wait() -> None:
    setup = Setup()
    setup.limit.add_unread("a", UNREAD_BYTES_PER_S)
    assert setup.limit.delay_s("a") == pytest.approx(1.0 - UNREAD_BURST_S + 1 / UNREAD_PER_S)
    setup.limit.add_unread("a", 5 * UNREAD_BYTES_PER_S)
    assert setup.limit.delay_s("a") == MAX_DELAY_S
    assert setup.limit.delay_s("b") == 0.0
    # They are no refusals whose bodies were read.
    assert not setup.refused_for()


async def other_tenant(live: Live) -> dict[str, str]:
    """Headers with its key."""
    async with live.database.transaction() as connection:
        tenant_id = await make_tenant(connection, "other")
        _, text = await keys.create_key(connection, PEPPER, tenant_id, TENANT_SCOPES)
    return {"authorization": f"Bearer {text}"}


def code_of(answer: httpx.Response) -> str:
    error: dict[str, Any] = answer.json()["error"]
    return error.get("code") or error["details"]["error_code"]


KINDS: dict[str, tuple[Reply, dict[str, int], dict[str, Any], int]] = {
    "the queue is full": (Reply([], failure=ErrorCode.OVERLOADED), {}, {}, 503),
    "the model is unloaded": (Reply([], failure=ErrorCode.MODEL_UNAVAILABLE), {}, {}, 503),
    "too many tokens": (Reply([65]), {"tokens_per_minute": 6}, {"max_tokens": 50}, 429),
    "no such field": (Reply([65]), {}, {"surprise": 1}, 400),
    "no such model": (Reply([65]), {}, {"model": "nobody"}, 404),
    "a value out of range": (Reply([65]), {}, {"temperature": 9}, 400),
}
"""What the worker answers, the tenant's limits, the request's fields, and the status."""


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_request_is_refused_for_after_it_is_read_counts(
    live: Live, kind: str
) -> None:
    reply, limits, fields, status = KINDS[kind]
    live.worker.script = lambda _: reply
    body = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 3} | fields).encode()
    others = await other_tenant(live)
    async with live.worker, live.gateway(tenant_refusals_per_minute=MANY) as plane:
        if limits:
            await limited(live, plane, **limits)
        refused = [await plane.client.post(PATH, content=body) for _ in range(MANY)]
        assert [answer.status_code for answer in refused] == [status] * MANY
        num_received = len(live.worker.requests)
        # Nothing of the body is sent, and the answer comes all the same.
        async with posting(plane, live.key, PATH, 9 * MIB) as request:
            answered, head, error = await request.answer()
        assert (answered, error["code"]) == (429, "too_many_refusals")  # type: ignore[index]
        assert b"retry-after: " in head and b"x-should-retry" not in head
        assert len(live.worker.requests) == num_received
        live.worker.script = lambda _: Reply([65])
        answer = await plane.client.post(PATH, content=BODY, headers=others)
        assert answer.status_code == 200


async def test_every_route_with_a_key_is_held_to_it(live: Live) -> None:
    """In the shape of its dialect. Requests that are served count for nothing."""
    async with live.worker, live.gateway(tenant_refusals_per_minute=MANY) as plane:
        for _ in range(MANY):
            assert (await call(plane, PATH)).status_code == 200
        for _ in range(MANY):
            assert (await plane.complete("nobody")).status_code == 404
        answers = {path: await call(plane, path) for path in CALLS}
        assert {path for path, each in answers.items() if each.status_code != 429} == set()
        assert {code_of(each) for each in answers.values()} == {"too_many_refusals"}
        error = answers["/v1/messages"].json()
        assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bytes_that_are_read_of_refused_requests_count(live: Live, is_chunked: bool) -> None:
    body = json.dumps({"model": "nobody", "prompt": "a" * 300_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 50_000):
            yield body[begin : begin + 50_000]

    async with (
        live.worker,
        live.gateway(tenant_refusals_per_minute=4 * 300_000 // UNIT_BYTES) as plane,
    ):
        codes: list[str] = []
        for _ in range(5):
            content = chunks() if is_chunked else body
            codes.append(code_of(await plane.client.post(PATH, content=content)))
    assert codes == ["model_not_found"] * 4 + ["too_many_refusals"]


async def exhausted(live: Live, plane: GatewayPlane) -> None:
    for _ in range(MANY):
        assert (await plane.complete("nobody")).status_code == 404


SHORT, LONG = 20_000, 2 * MIB


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_the_connection_goes_on_after_a_body_that_is_not_read(
    live: Live, path: str, length: int
) -> None:
    """With the body after the answer, with all of it before, and in chunks."""
    async with live.worker, live.gateway(tenant_refusals_per_minute=MANY) as plane:
        await exhausted(live, plane)
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {live.key}\r\n"
        async with posting(plane, live.key, path, length) as request:
            assert (await request.answer())[0] == 429
            await request.send(bytes(length))
            await request.send(f"{head}content-length: {length}\r\n\r\n".encode() + bytes(length))
            assert (await request.answer())[0] == 429
            part = f"{length // 2:x}\r\n".encode() + bytes(length // 2) + b"\r\n"
            await request.send(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + part)
            assert (await request.answer())[0] == 429
            await request.send(part + b"0\r\n\r\n")
            await request.send(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await request.answer())[0] == 200


async def test_beyond_all_turns_the_connection_is_closed(live: Live) -> None:
    """After an answer that says so."""
    async with live.worker, live.gateway(tenant_refusals_per_minute=MANY) as plane:
        await exhausted(live, plane)
        plane.gateway.refusals.add_unread(live.tenant_id, 7 * UNREAD_BYTES_PER_S)
        async with posting(plane, live.key, PATH, LONG) as request:
            status, head, error = await request.answer()
            assert status == 429 and b"connection: close" in head
            assert error["code"] == "too_many_refusals"  # type: ignore[index]
            with pytest.raises(ConnectionError):
                for _ in range(LONG // 4096):
                    await request.send(bytes(4096))
                    await asyncio.sleep(0)


async def test_refusals_that_wait_for_their_turn_hold_no_bytes_of_others(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come of a body is its tenant's. Beyond the tenant's part no refusal waits."""
    budget, may_answer = BodyBudget(8 * 5 * SHORT), asyncio.Event()
    others = await other_tenant(live)

    async def wait_for_turn(*_: Any) -> None:
        await may_answer.wait()

    monkeypatch.setattr(http_request, "_wait_for_turn", wait_for_turn)
    async with (
        live.worker,
        live.gateway(tenant_refusals_per_minute=MANY, bodies=budget) as plane,
        AsyncExitStack() as stack,
    ):
        await exhausted(live, plane)
        waiting: list[asyncio.Task[tuple[int, bytes, Any]]] = []
        for number in range(7):
            request = await stack.enter_async_context(posting(plane, live.key, "/livez", 0))
            await request.answer()
            await request.send(
                f"POST {PATH} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {live.key}\r\n"
                f"content-length: {SHORT}\r\n\r\n".encode()
                + bytes(SHORT)
            )
            if number < 5:
                waiting.append(asyncio.create_task(request.answer()))
                await eventually(lambda n=number: budget.num_bytes == (n + 1) * SHORT)
            else:
                assert (await request.answer())[0] == 429
        assert not any(answer.done() for answer in waiting) and budget.num_unowned_bytes == 0
        answer = await plane.client.post(PATH, content=BODY, headers=others)
        assert answer.status_code == 200
        may_answer.set()
        assert {status for status, _, _ in await asyncio.gather(*waiting)} == {429}
        await eventually(lambda: budget.num_bytes == 0)


async def test_too_many_at_once_are_not_counted(live: Live) -> None:
    """Their bodies are not read either. They keep their own answer however many there are."""
    live.worker.script, live.worker.step_s = lambda _: Reply([65], never_ends=True), 0.05
    async with live.worker, live.gateway(tenant_refusals_per_minute=MANY) as plane:
        await limited(live, plane, concurrent_requests=1)
        async with plane.client.stream(
            "POST", PATH, json={"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 500}
        ) as first:
            assert first.status_code == 200
            for _ in range(3):
                for path in ON_WORKER:
                    answer = await call(plane, path)
                    assert answer.status_code == 429 and code_of(answer) == "rate_limit_exceeded"
