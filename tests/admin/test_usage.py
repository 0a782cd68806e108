"""Sums that are the sums of their rows, and who may see which."""

from __future__ import annotations

import asyncio
import csv
import io
import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest

from admin.database import Database
from admin.queries import sql
from tests.admin.conftest import Plane

NOON = datetime(2026, 3, 5, 12, tzinfo=UTC)
NUMBERS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def row(number: int, at: datetime = NOON, **fields: Any) -> dict[str, Any]:
    """What a gateway loads of a request: number + 1 prompt tokens, 2 completion tokens."""
    return {
        "request_id": f"{number:032x}",
        "admitted_at": at.timestamp(),
        "tenant_id": "ten_acme00000000",
        "key_id": "keykeykeykey",
        "model": "tiny",
        "adapter": None,
        "adapter_version": None,
        "prompt_tokens": number + 1,
        "cached_tokens": number // 2,
        "completion_tokens": 2,
        "ttft_ms": 1.5,
        "duration_ms": 20.0,
        "finish_reasons": ["stop", None],
        "worker": "w",
        "trace_id": None,
        "status": "completed",
        **fields,
    }


async def load(database: Database, rows: list[dict[str, Any]]) -> None:
    async with database.transaction() as connection:
        await connection.execute(sql["usage_make_room"], rows)
        await connection.execute(sql["usage_load"], rows)


async def fetch(database: Database, query: str) -> list[tuple[Any, ...]]:
    async with database.acquire() as connection:
        return [tuple(found.values()) for found in await connection.fetch(query)]


SUMS_OF_ROWS = """
SELECT date_trunc('hour', admitted_at, 'UTC'), tenant_id, model, coalesce(adapter, ''), key_id,
       count(*)::bigint, sum(prompt_tokens)::bigint, sum(cached_tokens)::bigint,
       sum(completion_tokens)::bigint
FROM usage GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5"""
SUMS_KEPT = "SELECT * FROM usage_hourly ORDER BY 1, 2, 3, 4, 5"


@pytest.mark.parametrize("seed", range(3))
async def test_sums_by_hour_are_the_sums_of_the_rows(database: Database, seed: int) -> None:
    """Late rows, replays, several loaders at once that load the same, and some that give up."""
    chance = random.Random(seed)
    rows = [
        row(
            number,
            NOON + timedelta(minutes=chance.randrange(-2000, 2000)),
            tenant_id=chance.choice(["ten_acme00000000", "ten_globex000000"]),
            adapter=chance.choice([None, "bot", "notes"]),
            key_id=chance.choice(["a", "b"]),
        )
        for number in range(300)
    ]

    async def load_some() -> None:
        for _ in range(10):
            some = chance.sample(rows, chance.randrange(1, 60))
            try:
                async with database.transaction() as connection:
                    await connection.execute(sql["usage_make_room"], some)
                    await connection.execute(sql["usage_load"], some)
                    if chance.random() < 0.3:
                        raise GaveUp
            except GaveUp:
                pass

    await asyncio.gather(*(load_some() for _ in range(4)))
    assert await fetch(database, SUMS_KEPT) == await fetch(database, SUMS_OF_ROWS)
    await load(database, chance.sample(rows, len(rows)))
    assert await fetch(database, SUMS_KEPT) == await fetch(database, SUMS_OF_ROWS)
    assert await fetch(database, "SELECT count(*), count(DISTINCT request_id) FROM usage") == [
        (len(rows), len(rows))
    ]


class GaveUp(Exception):
    pass


async def test_days_past_are_dropped_and_stay_counted(database: Database) -> None:
    """What is loaded again of a day that is not kept would otherwise count twice."""
    today = datetime.now(UTC)
    days = [row(number, today - timedelta(days=number)) for number in range(6)]
    await load(database, days)
    async with database.transaction() as connection:
        upkeep = await connection.fetchrow(sql["usage_upkeep"], 3)
    assert upkeep is not None and upkeep["dropped"] == 3
    assert await fetch(database, "SELECT count(*) FROM usage") == [(3,)]
    before = await fetch(database, SUMS_KEPT)
    assert len(before) == 6
    await load(database, days)
    assert await fetch(database, SUMS_KEPT) == before
    assert await fetch(database, "SELECT count(*) FROM usage") == [(3,)]
    partitions = await fetch(
        database,
        "SELECT inhrelid::regclass::text FROM pg_inherits"
        " WHERE inhparent = 'usage'::regclass ORDER BY 1",
    )
    assert partitions == [(_partition(today.date() + timedelta(days=n)),) for n in range(-2, 3)]


def _partition(day: date) -> str:
    return f"usage_{day:%Y%m%d}"


async def ask(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    """Every page of a report, over the days of the rows unless said otherwise."""
    query = {"start": "2026-03-05T00:00:00Z", "end": "2026-03-07T00:00:00Z"} | query
    found: list[dict[str, Any]] = []
    while True:
        answer = await client.get("usage", params=query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += page["data"]
        assert page["has_more"] == (page["after"] is not None)
        if not page["has_more"]:
            return found
        query["after"] = page["after"]


async def make_usage(plane: Plane) -> dict[str, str]:
    """Rows of acme (numbers 0 to 11) and globex (12 to 23), one each two hours; tenants' ids."""
    ids: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for name in ("acme", "globex"):
        ids[name] = (await plane.client.get(f"tenants/{name}")).json()["id"]
        for n in range(12):
            number = len(rows)
            at = datetime(2026, 3, 5, 1, 59, tzinfo=UTC) + timedelta(hours=2 * n)
            adapter = "bot" if n % 3 else None
            rows.append(
                row(number, at, tenant_id=ids[name], adapter=adapter, key_id=f"{name}{n % 2}")
            )
    await load(plane.database, rows)
    return ids


async def test_reports_by_bucket_and_group(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.tenant("globex")
    ids = await make_usage(plane)
    (total,) = await ask(plane.client)
    assert total == {
        "start": "2026-03-05T00:00:00Z",
        "requests": 24,
        "prompt_tokens": 300,
        "cached_tokens": sum(n // 2 for n in range(24)),
        "completion_tokens": 48,
    }
    hours = await ask(plane.client, bucket="1h")
    assert [hour["start"][11:13] for hour in hours] == [f"{h:02}" for h in range(1, 24, 2)]
    assert hours[0]["prompt_tokens"] == 1 + 13
    tenants = await ask(plane.client, group_by="tenant")
    assert {each["tenant"]: each["prompt_tokens"] for each in tenants} == {
        ids["acme"]: 78,
        ids["globex"]: 222,
    }
    finest = await ask(plane.client, bucket="1h", group_by="key,adapter,tenant,model", limit=5)
    assert len(finest) == 24
    assert Counter(each["adapter"] for each in finest) == {None: 8, "bot": 16}
    assert {each["key"] for each in finest} == {"acme0", "acme1", "globex0", "globex1"}
    for name in NUMBERS:
        assert sum(each[name] for each in finest) == total[name]
    only = await ask(plane.client, tenant="globex", start="2026-03-05T23:30:00Z", bucket="1h")
    assert [(each["start"], each["requests"]) for each in only] == [("2026-03-05T23:00:00Z", 1)]


async def test_a_tenants_key_sees_its_own_and_no_other(plane: Plane) -> None:
    acme = await plane.tenant("acme", scopes=["usage:read"])
    blind = await plane.tenant("globex", scopes=["inference"])
    ids = await make_usage(plane)
    own = await ask(acme, group_by="tenant,key")
    assert {each["tenant"] for each in own} == {ids["acme"]}
    assert {each["key"] for each in own} == {"acme0", "acme1"}
    assert sum(each["prompt_tokens"] for each in own) == 78
    assert await ask(acme, tenant="acme", group_by="tenant,key") == own
    answers = [
        await acme.get("usage", params={"tenant": t}) for t in ("globex", ids["globex"], "x")
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert (await blind.get("usage")).status_code == 403
    organization = plane.url.removesuffix("/admin/v1") + "/v1/organization/usage/completions"
    assert (await acme.get(organization, params={"start_time": 1})).status_code == 403


async def test_csv_is_the_same_table(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.tenant("globex")
    await make_usage(plane)
    query = {
        "start": "2026-03-05T00:00:00Z",
        "end": "2026-03-06T00:00:00Z",
        "bucket": "1h",
        "group_by": "key,adapter",
    }
    rows = await ask(plane.client, **query)
    answer = await plane.client.get("usage", params=query, headers={"accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    found = list(csv.DictReader(io.StringIO(answer.text)))
    assert list(found[0]) == ["start", "adapter", "key", *NUMBERS]
    assert found == [{name: str(value or "") for name, value in _csv_row(r).items()} for r in rows]
    url, pages = f"?{httpx.QueryParams(query | {'format': 'csv', 'limit': 7})}", 0
    paged: list[dict[str, str]] = []
    while url:
        answer = await plane.client.get(f"{plane.url}/usage{url}")
        paged += csv.DictReader(io.StringIO(answer.text))
        url, pages = answer.links.get("next", {}).get("url", ""), pages + 1
    assert (paged, pages) == (found, 4)


def _csv_row(view: dict[str, Any]) -> dict[str, Any]:
    """Numbers as text, so that 0 is not nothing."""
    numbers = {name: str(view[name]) for name in NUMBERS}
    return {"start": view["start"], "adapter": view["adapter"], "key": view["key"], **numbers}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"group_by": "tenant,color"}, "group_by"),
        ({"start": "2026-03-05T00:00:00"}, "start"),
        ({"start": "2026-03-05T00:00:00Z", "end": "2026-03-05T00:00:00Z"}, "start"),
        ({"after": "nonsense"}, "after"),
        ({"after": "WzFd"}, "after"),
        ({"bucket": "1w"}, None),
        ({"limit": "0"}, None),
    ],
)
async def test_what_makes_no_sense_is_refused(
    plane: Plane, query: dict[str, str], param: str | None
) -> None:
    answer = await plane.client.get("usage", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_openais_client_reads_it(plane: Plane) -> None:
    """Buckets by minute, hour and day, those without requests too, page by page."""
    await plane.tenant("acme")
    await plane.tenant("globex")
    ids = await make_usage(plane)
    key = plane.client.headers["authorization"].removeprefix("Bearer ")
    start = int(datetime(2026, 3, 5, tzinfo=UTC).timestamp())
    base_url = plane.url.removesuffix("/admin/v1") + "/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", admin_api_key=key, max_retries=0
    ) as client:
        completions = client.admin.organization.usage.completions
        days = await completions(start_time=start, end_time=start + 3 * 86400)
        assert [(len(day.results), day.start_time) for day in days.data] == [
            (1, start),
            (0, start + 86400),
            (0, start + 2 * 86400),
        ]
        result: Any = days.data[0].results[0]
        assert result.object == "organization.usage.completions.result"
        assert (result.num_model_requests, result.input_tokens, result.output_tokens) == (
            24,
            300,
            48,
        )
        assert result.input_cached_tokens == sum(n // 2 for n in range(24))
        assert (result.project_id, result.model, days.has_more) == (None, None, False)

        seen: Counter[tuple[str | None, str | None]] = Counter()
        page, num_pages, starts = None, 0, list[int]()
        while True:
            hours = await completions(
                start_time=start,
                end_time=start + 86400,
                bucket_width="1h",
                group_by=["project_id", "model"],
                api_key_ids=["acme0", "globex0", "globex1"],
                limit=10,
                page=page or openai.omit,
            )
            for hour in hours.data:
                starts.append(hour.start_time)
                for each in hour.results:
                    result = each
                    seen[result.project_id, result.model] += result.num_model_requests
            num_pages, page = num_pages + 1, hours.next_page
            assert hours.has_more == (page is not None)
            if page is None:
                break
        assert num_pages == 3 and starts == list(range(start, start + 86400, 3600))
        assert seen == {(ids["acme"], "tiny"): 6, (ids["globex"], "tiny"): 12}

        minutes = await completions(
            start_time=start + 3600,
            end_time=start + 7200,
            bucket_width="1m",
            project_ids=[ids["acme"]],
        )
        full = [minute for minute in minutes.data if minute.results]
        assert len(minutes.data) == 60 and [m.start_time for m in full] == [start + 3600 + 59 * 60]
        for unsupported in ({"user_ids": ["u"]}, {"batch": True}, {"group_by": ["batch"]}):
            with pytest.raises(openai.BadRequestError, match=r"support|group_by"):
                await completions(start_time=start, **unsupported)  # pyright: ignore
        with pytest.raises(openai.BadRequestError, match="limit"):
            await completions(start_time=start, limit=32)
