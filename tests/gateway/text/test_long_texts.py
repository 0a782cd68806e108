"""Long texts of one tenant wait for each other, and nobody else for them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import httpx

from admin.keys import keys
from gateway.http.routes.tokens import MIN_COUNTED
from gateway.text.long_texts import LONG, LongTexts
from store.records import TENANT_SCOPES
from tests.admin.lifecycle import make_tenant
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.pepper import PEPPER
from tests.waiting import eventually

NUM_LONG = 24


async def test_who_goes_away_keeps_his_turn_until_the_work_is_done() -> None:
    """Or he could fill the threads with work that nobody waits for."""
    long_texts = LongTexts()
    may_end = threading.Event()
    first = asyncio.create_task(long_texts.run("a", may_end.wait))
    await asyncio.sleep(0)
    second = asyncio.create_task(long_texts.run("a", lambda: "second"))
    await asyncio.sleep(0)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    assert await long_texts.run("b", lambda: "another's") == "another's"
    assert not second.done()
    may_end.set()
    assert await second == "second"


async def test_one_who_gives_up_waiting_and_one_that_fails_hold_up_nobody() -> None:
    long_texts = LongTexts()

    def fail() -> str:
        raise ValueError

    tasks = [asyncio.create_task(long_texts.run("a", work)) for work in (fail, str, str)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in found] == [ValueError, asyncio.CancelledError, str]


async def test_a_tenants_long_texts_do_not_hold_up_anothers(live: Live) -> None:
    async with live.database.transaction() as connection:
        other = await make_tenant(connection, "other")
        _, text = await keys.create_key(connection, PEPPER, other, TENANT_SCOPES)
    async with live.gateway() as plane:
        tasks = [
            asyncio.create_task(tokenize(plane, live.key, MIN_COUNTED - 2)) for _ in range(NUM_LONG)
        ]
        await eventually(lambda: any(task.done() for task in tasks))
        assert (await tokenize(plane, text, LONG)).status_code == 200
        num_done = sum(task.done() for task in tasks)
        answers = await asyncio.gather(*tasks)
    assert num_done < NUM_LONG // 2
    assert {answer.status_code for answer in answers} == {200}


async def tokenize(plane: GatewayPlane, key: str, num_chars: int) -> httpx.Response:
    return await plane.client.post(
        "/tokenize",
        json={"model": "tiny", "prompt": "a " * (num_chars // 2 + 1)},
        headers={"authorization": f"Bearer {key}"},
    )
