"""Limits of tenants and keys over a real Postgres: what is refused, what is told, what is given
back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from admin.keys import keys
from store.records import TENANT_SCOPES
from tests.adapters.files import BASE
from tests.gateway.live import GatewayPlane, Live, answer
from tests.gateway.pepper import PEPPER
from tests.scripted_worker import Reply, ScriptedWorker
from tests.waiting import eventually
from workers.wire.protocol import Generate
from workers.wire.status import AdapterStatus

PROMPT_TOKENS = 2
DOLLAR = 10**12


def endless(_: Generate) -> Reply:
    return Reply([65], never_ends=True)


def wordy(request: Generate) -> Reply:
    return Reply([65] * request.params.max_tokens)


async def limited(live: Live, plane: GatewayPlane, **limits: int) -> None:
    """The gateway knows of it when this returns."""
    await live.limit(**limits)
    await knows(plane, lambda: bool(plane.gateway.catalog.current.limits_of(live.tenant_id, "")))


async def lengthen(live: Live, plane: GatewayPlane) -> None:
    """The context of `tiny`, to that of the worker."""
    await live.fetch("UPDATE base_models SET max_model_len = 4096 RETURNING 1")
    await knows(plane, lambda: plane.gateway.catalog.current.models["tiny"].max_model_len == 4096)


async def knows(plane: GatewayPlane, condition: Callable[[], bool]) -> None:
    await eventually(condition)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


async def test_requests_of_a_minute(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=5)
        answers = [await plane.complete("tiny") for _ in range(7)]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
    assert left == ["4", "3", "2", "1", "0", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"5"}
    refused = answers[-1]
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["param"] == "requests_per_minute"
    assert "is 5; 0 of it is left" in error["message"] and "It frees in" in error["message"]
    assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
    assert int(refused.headers["retry-after"]) <= 60
    assert "x-should-retry" not in refused.headers


async def test_the_headers_are_those_of_a_bucket(live: Live) -> None:
    """Whatever is asked: each says what is left once its own request is reserved."""
    limits, draw = {"tokens_per_minute": 400, "requests_per_minute": 30}, random.Random(13)
    live.worker.script = lambda request: Reply(
        [65] * random.Random(request.params.seed).randint(1, 9)
    )
    used = num_requests = 0
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, **limits)
        for _ in range(40):
            max_tokens = draw.randint(1, 60)
            answer = await plane.complete("tiny", max_tokens=max_tokens, seed=draw.randrange(99))
            fits = used + PROMPT_TOKENS + max_tokens <= 400 and num_requests < 30
            assert answer.status_code == (200 if fits else 429)
            if fits:
                num_requests += 1
            tokens_left = 400 - used - (PROMPT_TOKENS + max_tokens if fits else 0)
            assert answer.headers["x-ratelimit-remaining-tokens"] == str(tokens_left)
            assert answer.headers["x-ratelimit-remaining-requests"] == str(30 - num_requests)
            assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
            used += answer.json()["usage"]["total_tokens"] if fits else 0
    assert num_requests == 30 or used > 340


async def test_what_is_cached_counts_by_its_weight(live: Live) -> None:
    live.worker.script = lambda _: Reply([65, 66, 67], num_cached_tokens=2)
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, tokens_per_minute=100, cached_weight=10)
        await plane.complete("tiny", prompt=[1, 2, 3, 4])
        answer = await plane.complete("tiny", prompt=[1, 2, 3, 4], max_tokens=1)
    # 4 - 2 + ceil(0.2) + 3 of the first, 4 + 1 of the second as long as it runs.
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 6 - 5)


async def test_a_request_above_a_limit_is_never_worth_a_retry(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, tokens_per_minute=10)
        answer = await plane.complete("tiny", max_tokens=50)
    assert "never" in error_of(answer, 429)["message"]
    assert answer.headers["x-should-retry"] == "false"


async def test_requests_at_once(live: Live) -> None:
    live.worker.script, live.worker.step_s = endless, 0.02
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, concurrent_requests=2)
        body = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 500}
        async with plane.client.stream("POST", "/v1/completions", json=body) as first:
            async with plane.client.stream("POST", "/v1/completions", json=body) as second:
                assert first.status_code == second.status_code == 200
                refused = await plane.complete("tiny")
                assert error_of(refused, 429)["param"] == "concurrent_requests"
            live.worker.script = lambda _: Reply([65])
            await eventually(lambda: plane.gateway.admission.num_open == 1)
            assert (await plane.complete("tiny")).status_code == 200


async def test_a_months_money(live: Live) -> None:
    """Prices as they are at admission; what was used is known to the next gateway."""
    await live.price(input=10**9, cached_input=10**8, output=2 * 10**9)
    of_one = PROMPT_TOKENS * 10**9 + 3 * 2 * 10**9
    async with live.worker:
        async with live.gateway("one") as plane:
            await limited(live, plane, spend_per_month=3 * of_one)
            assert (await plane.complete("tiny")).status_code == 200
            assert (await plane.complete("tiny")).status_code == 200
        async with live.gateway("two") as plane:
            assert (await plane.complete("tiny")).status_code == 200
            refused = await plane.complete("tiny")
    error = error_of(refused, 429)
    assert (error["param"], error["code"]) == ("spend_per_month", "insufficient_quota")
    assert f"${3 * of_one / DOLLAR:.6f}" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert await spent(live) == 3 * of_one
    (parts,) = await live.fetch(
        "SELECT sum(input_cost), sum(cached_input_cost) AS cached, sum(output_cost) AS output"
        " FROM usage"
    )
    assert tuple(parts.values()) == (3 * PROMPT_TOKENS * 10**9, 0, 3 * 3 * 2 * 10**9)


async def spent(live: Live) -> int:
    return int((await live.fetch("SELECT sum(cost) AS cost FROM usage"))[0]["cost"])


async def test_the_key_has_limits_of_its_own(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await live.limit(key=True, requests_per_minute=2)
        await limited(live, plane, requests_per_minute=100)
        answers = [await plane.complete("tiny") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert "this API key" in error_of(answers[-1], 429)["message"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"


async def test_rotated_keys_share_their_limits_and_what_they_use(live: Live) -> None:
    """The second of three is rotated again; what the first used is known to the last, before it is
    loaded and after."""
    texts = [live.key]
    async with live.worker:
        async with live.gateway() as plane:
            await live.limit(key=True, tokens_per_day=20)
            for _ in range(2):
                async with live.database.transaction() as connection:
                    made, text = await keys.rotate_key(connection, PEPPER, texts[-1][4:16], 3600)
                texts.append(text)
            assert made.quota_subject == texts[0][4:16]
            await knows(plane, lambda: made.id in plane.gateway.catalog.current.keys)
            codes = [await status_with(plane, text) for text in texts]
        async with live.gateway() as plane:
            codes += [await status_with(plane, text) for text in texts]
    assert codes == [200, 200, 200, 200, 429, 429]
    used = await live.fetch(
        "SELECT metered_tokens FROM usage_totals WHERE subject = $1", texts[0][4:16]
    )
    assert [row["metered_tokens"] for row in used] == [20, 20]
    rows = await live.fetch("SELECT key_id, count(*) AS n FROM usage GROUP BY 1 ORDER BY 2")
    assert [row["n"] for row in rows] == [1, 1, 2]


async def status_with(plane: GatewayPlane, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}
    return (await plane.client.post("/v1/completions", json=body, headers=headers)).status_code


async def test_a_request_keeps_the_limits_that_it_began_with(live: Live) -> None:
    """The tenant gets a limit that the request would exceed, while its body arrives."""
    async with live.worker, live.gateway() as plane:

        async def body() -> AsyncIterator[bytes]:
            yield b'{"model": "tiny", "prompt": "Hi", '
            await limited(live, plane, tokens_per_minute=PROMPT_TOKENS)
            yield b'"max_tokens": 3}'

        began = await plane.client.post("/v1/completions", content=body())
        later = await plane.complete("tiny")
    assert (began.status_code, later.status_code) == (200, 429)


async def test_who_is_refused_has_no_adapters_fetched_ahead(live: Live) -> None:
    """Or a tenant beyond its limit could move the adapters of others about for nothing."""
    await live.make_ready(*"123456")
    async with live.worker, live.gateway() as plane:
        # One token is left, so that the next requests are refused only when their prompts are read.
        await limited(live, plane, tokens_per_minute=PROMPT_TOKENS + 3 + 1)
        codes = [(await plane.complete(f"bot@{number}")).status_code for number in range(1, 7)]
        await live.limit(tokens_per_minute=100)
        await eventually(lambda: plane.serves("bot@6"))
        assert await plane.serves("bot@5")
    assert codes == [200] + [429] * 5
    prefetched = [adapter.digest for adapter in live.worker.prefetched]
    assert prefetched == [str(number) * 64 for number in (1, 2, 5)]


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_a_long_prompt_is_not_read_of_a_tenant_that_has_nothing_left(
    live: Live, limit: str
) -> None:
    """It is told so, and not that no context holds its prompt."""
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, **{limit: 1 if limit.startswith("req") else PROMPT_TOKENS + 3})
        assert (await plane.complete("tiny")).status_code == 200
        answer = await plane.complete("tiny", prompt="a" * (1 << 18))
        assert plane.gateway.admission.num_open == 0
    assert error_of(answer, 429)["param"] == limit


async def test_who_is_refused_makes_no_worker_look_busy(live: Live) -> None:
    """What is sent nowhere sends nobody away from the worker that has his adapter."""
    other = ScriptedWorker(
        f"unix:{live.folder}/other.sock", [BASE.digest], answer, instance_id="other"
    )
    other.adapters = [AdapterStatus("a" * 64, "device", 1 << 20, 0, False)]
    await live.make_ready("a")
    async with live.database.transaction() as connection:
        _, text = await keys.create_key(connection, PEPPER, live.tenant_id, TENANT_SCOPES)
    async with live.worker, other, live.gateway(workers=[live.worker.address, other.address]) as at:
        await lengthen(live, at)
        await live.limit(key=True, requests_per_minute=0)
        known = at.gateway.catalog
        await knows(at, lambda: known.current.limits_of(live.tenant_id, live.key[4:16]))
        clients = at.gateway.fleet.clients
        await eventually(lambda: all(client.status is not None for client in clients))
        # At 1,000 tokens/s, which is believed of a worker at first, 8 seconds.
        refused = [await at.complete(prompt="x" * 4000) for _ in range(2)]
        at.client.headers["authorization"] = f"Bearer {text}"
        assert await at.serves("bot")
    assert {each.status_code for each in refused} == {429}
    assert (len(live.worker.requests), len(other.requests)) == (0, 1)


async def test_no_limits_no_headers(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        answer = await plane.complete("tiny")
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_a_limit_that_is_lifted_holds_nobody(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=1)
        assert (await plane.complete("tiny")).status_code == 200
        assert (await plane.complete("tiny")).status_code == 429
        await live.limit(requests_per_minute=3)
        await knows(
            plane,
            lambda: plane.gateway.catalog.current.limits_of(live.tenant_id, "")[0].amount == 3,
        )
        answers = [await plane.complete("tiny") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_ends_where_more_is_refused(live: Live, stream: bool) -> None:
    """1,024 tokens are reserved at a time; the limit has room for one and a half of that."""
    live.worker.script = wordy
    limit = PROMPT_TOKENS + 1500
    async with live.worker, live.gateway() as plane:
        await lengthen(live, plane)
        await limited(live, plane, tokens_per_day=limit)
        client = openai.AsyncOpenAI(
            base_url=str(plane.client.base_url.join("/v1")), api_key=live.key, max_retries=0
        )
        fields: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "max_tokens": 2000}
        if stream:
            chunks = await client.completions.create(
                stream=True, stream_options={"include_usage": True}, **fields
            )
            events = [chunk async for chunk in chunks]
            (reason,) = [
                e.choices[0].finish_reason for e in events[:-1] if e.choices[0].finish_reason
            ]
            usage = events[-1].usage
        else:
            answer = await client.completions.create(**fields)
            reason, usage = answer.choices[0].finish_reason, answer.usage
        await client.close()
        await eventually(lambda: plane.gateway.admission.num_open == 0)
    assert usage is not None and reason == "length"
    assert 1024 <= usage.completion_tokens <= 1500
    (row,) = await live.fetch("SELECT metered_tokens FROM usage")
    assert row["metered_tokens"] == usage.completion_tokens + PROMPT_TOKENS <= limit


async def test_an_answer_goes_on_where_more_is_granted(live: Live) -> None:
    live.worker.script = wordy
    async with live.worker, live.gateway() as plane:
        await lengthen(live, plane)
        await limited(live, plane, tokens_per_day=5000)
        answer = await plane.complete("tiny", max_tokens=3000)
    assert answer.json()["usage"]["completion_tokens"] == 3000


async def test_what_fails_before_it_runs_takes_nothing(live: Live) -> None:
    async with live.gateway() as plane:
        await limited(live, plane, tokens_per_day=100, concurrent_requests=1)
        for _ in range(3):
            assert (await plane.complete("tiny")).status_code == 503
        assert plane.gateway.admission.num_open == 0
    async with live.worker, live.gateway() as plane:
        assert (await plane.complete("tiny")).status_code == 200


async def test_a_gateway_that_leaves_holds_nothing(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, tokens_per_day=1000, concurrent_requests=5)
        await plane.complete("tiny")
        assert await live.fetch("SELECT 1 FROM quota_leases")
    assert not await live.fetch("SELECT 1 FROM quota_leases")
    (total,) = await live.fetch(
        "SELECT * FROM usage_totals WHERE span = 'day' AND subject = $1", live.tenant_id
    )
    assert total["metered_tokens"] == PROMPT_TOKENS + 3


async def test_a_worker_that_is_lost_while_a_request_waits_for_its_limit(live: Live) -> None:
    """It was chosen before the request had to wait for more tokens than its gateway holds."""
    async with live.gateway() as plane:
        fleet = plane.gateway.fleet
        await lengthen(live, plane)
        await limited(live, plane, tokens_per_day=1000)
        async with live.worker:
            await eventually(lambda: plane.serves("tiny"))
        async with live.database.transaction() as elsewhere:
            await elsewhere.execute("SELECT FROM quotas FOR UPDATE")
            async with live.worker:
                await eventually(lambda: fleet.why_not_serving() is None)
                asked = asyncio.create_task(plane.complete("tiny", max_tokens=800))
                await eventually(lambda: live.fetch("SELECT FROM pg_locks WHERE NOT granted"))
            await eventually(lambda: fleet.why_not_serving() is not None)
        async with live.worker:
            assert (await asked).status_code == 200
