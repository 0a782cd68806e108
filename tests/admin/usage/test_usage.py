"""Sums that are the sums of their rows, and who may see which."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import itertools
import json
import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from admin.usage.usage import Cursor, UsageQuestion, Width, report
from store.database import EVERYTHING, Database
from store.queries import sql
from tests.admin.conftest import Plane
from tests.scale import scaled

NOON = datetime(2026, 3, 5, 12, tzinfo=UTC)
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens", "metered_tokens")
PARTS = ("input_cost", "cached_input_cost", "output_cost")
NUMBERS = ("requests", *TOKENS, "cost", *PARTS, "credited")


def row(number: int, at: datetime = NOON, **fields: Any) -> dict[str, Any]:
    """What a gateway loads of a request: number + 1 prompt tokens, 2 completion tokens; of a bot
    version 1. A token is metered as one and costs a micro-dollar; of a cost that is given the parts
    are not known."""
    tokens = number + 3
    counts = (number + 1 - number // 2, number // 2, 2)
    parts = (0, 0, 0) if "cost" in fields else [count * 10**6 for count in counts]
    return {
        **dict(zip(PARTS, parts, strict=True)),
        "request_id": f"{number:032x}",
        "admitted_at": at.timestamp(),
        "tenant_id": "ten_acme00000000",
        "key_id": "keykeykeykey",
        "model": "tiny",
        "adapter": None,
        "adapter_version": 1 if fields.get("adapter") else None,
        "prompt_tokens": number + 1,
        "cached_tokens": number // 2,
        "completion_tokens": 2,
        "ttft_ms": 1.5,
        "duration_ms": 20.0,
        "finish_reasons": ["stop", None],
        "worker": "w",
        "trace_id": None,
        "status": "completed",
        "gateway": "gateway-1",
        "metered_tokens": tokens,
        "cost": tokens * 10**6,
        "leased": 0,
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
SELECT date_trunc('hour', admitted_at, 'UTC'), tenant_id, model, coalesce(adapter, ''),
       coalesce(adapter_version, 0), key_id, count(*)::bigint, sum(prompt_tokens)::bigint,
       sum(cached_tokens)::bigint, sum(completion_tokens)::bigint, sum(metered_tokens)::bigint,
       sum(cost), sum(input_cost), sum(cached_input_cost), sum(output_cost)
FROM usage GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6"""
SUMS_KEPT = """
SELECT hour, tenant_id, model, adapter, adapter_version, key_id, requests, prompt_tokens,
       cached_tokens, completion_tokens, metered_tokens, cost, input_cost, cached_input_cost,
       output_cost
FROM usage_hourly ORDER BY 1, 2, 3, 4, 5, 6"""


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
            adapter_version=chance.choice([None, 1, 2]),
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


async def test_the_first_day_that_is_kept_counts_and_the_one_before_is_late(
    database: Database,
) -> None:
    today = datetime.now(UTC)
    rows = [row(number, today - timedelta(days=number)) for number in (2, 3)]
    async with database.transaction() as connection:
        await connection.execute(sql["usage_upkeep"], 3)
    await load(database, rows)
    assert await fetch(database, "SELECT request_id FROM usage") == [(rows[0]["request_id"],)]
    async with database.acquire() as connection:
        assert await connection.fetchval(sql["usage_late"], rows) == 1


@pytest.mark.parametrize("width", Width)
async def test_a_report_ends_before_the_bucket_that_begins_at_its_end(
    database: Database, width: Width
) -> None:
    start = width.floor(NOON)
    end = start + width.value
    await load(database, [row(0, start), row(1, end - timedelta(microseconds=1)), row(2, end)])
    asked = UsageQuestion(start=start, end=end, width=width)
    async with database.transaction() as connection:
        found = await report(connection, asked)
    assert [(each.start, each.requests) for each in found] == [(start, 2)]


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
        "metered_tokens": 348,
        "cost": "0.000348",
        "input_cost": "0.000168",
        "cached_input_cost": "0.000132",
        "output_cost": "0.000048",
        "credited": "0.00",
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
        assert sum(Decimal(each[name]) for each in finest) == Decimal(total[name])
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
    start = int(NOON.replace(hour=0).timestamp())
    query: dict[str, Any] = {"start_time": start, "group_by": "project_id"}
    seen = (await acme.get(organization, params=query)).json()["data"]
    projects = {each["project_id"] for bucket in seen for each in bucket["results"]}
    assert projects == {ids["acme"]}
    others = await acme.get(organization, params={**query, "project_ids": ids["globex"]})
    assert others.status_code == 404
    assert (await blind.get(organization, params=query)).status_code == 403


async def test_a_deleted_tenants_usage_is_found_by_its_id(plane: Plane) -> None:
    acme = await plane.tenant("acme", scopes=["usage:read"])
    await plane.tenant("globex")
    ids = await make_usage(plane)
    before = await ask(plane.client, tenant="globex", group_by="tenant")
    assert [each["tenant_name"] for each in before] == ["globex"]
    assert (await plane.client.delete("tenants/globex")).status_code == 200
    assert await ask(plane.client, tenant=ids["globex"], group_by="tenant") == before
    gone = (await plane.client.get(f"tenants/{ids['globex']}")).json()
    assert (gone["name"], gone["deleted_at"] is None) == ("globex", False)
    for client, reference in ((plane.client, "globex"), (acme, ids["globex"])):
        assert (await client.get("usage", params={"tenant": reference})).status_code == 404
    assert (await plane.client.delete(f"tenants/{ids['globex']}")).status_code == 404


async def test_csv_is_the_same_table(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.tenant("globex")
    await make_usage(plane)
    query = {
        "start": "2026-03-05T00:00:00Z",
        "end": "2026-03-06T00:00:00Z",
        "bucket": "1h",
        "group_by": "key,adapter,tenant",
    }
    rows = await ask(plane.client, **query)
    answer = await plane.client.get("usage", params=query, headers={"accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    found = list(csv.DictReader(io.StringIO(answer.text)))
    assert list(found[0]) == [
        *("start", "tenant", "tenant_name", "adapter", "key"),
        *NUMBERS,
    ]
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
    apart = ("start", "tenant", "tenant_name", "adapter", "key")
    return {name: view[name] for name in apart} | numbers


def cursor(start: str, adapter_version: int) -> str:
    mark = json.dumps([start, "", "", "", adapter_version, ""])
    return base64.urlsafe_b64encode(mark.encode()).decode()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"group_by": "tenant,color"}, "group_by"),
        ({"group_by": "adapter_version"}, "group_by"),
        ({"start": "2026-03-05T00:00:00"}, "start"),
        ({"start": "2026-03-05T00:00:00Z", "end": "2026-03-05T00:00:00Z"}, "start"),
        ({"end": "9999-12-31T23:59:59-14:00"}, "end"),
        ({"end": "0001-01-02T00:00:00Z"}, "end"),
        ({"start": "0001-01-01T00:00:00+14:00"}, "start"),
        ({"after": "nonsense"}, "after"),
        ({"after": "WzFd"}, "after"),
        ({"after": cursor("2026-03-05T00:00:00Z", 2**31)}, "after"),
        ({"after": cursor("2026-03-05T00:00:00Z", -1)}, "after"),
        ({"after": cursor("0001-01-01T00:00:00+14:00", 0)}, "after"),
        ({"bucket": "1w"}, "bucket"),
        ({"limit": "0"}, "limit"),
        ({"tenant": ""}, "tenant"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    plane: Plane, query: dict[str, str], param: str
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


async def test_versions_of_an_adapter_are_told_apart(plane: Plane) -> None:
    versions = [(None, None), ("bot", 1), ("bot", 2), ("notes", 2), ("bot", 2)]
    await load(
        plane.database,
        [row(n, adapter=name, adapter_version=v) for n, (name, v) in enumerate(versions)],
    )
    found = await ask(plane.client, group_by="adapter_version,adapter", limit=2)
    apart = {(each["adapter"], each["adapter_version"]): each["requests"] for each in found}
    assert apart == {(None, None): 1, ("bot", 1): 1, ("bot", 2): 2, ("notes", 2): 1}
    by_name = await ask(plane.client, group_by="adapter")
    assert {each["adapter"]: each["requests"] for each in by_name} == {
        None: 1,
        "bot": 3,
        "notes": 1,
    }


EXAMPLES = itertools.count()
MINUTES = st.integers(0, 2 * 24 * 60 - 1)
PICO_DOLLARS = st.integers(0, 1 << 60)
COSTS = st.lists(
    st.tuples(
        MINUTES,
        st.integers(0, 3),
        st.one_of(PICO_DOLLARS, st.tuples(PICO_DOLLARS, PICO_DOLLARS, PICO_DOLLARS)),
        st.integers(0, 1 << 40),
    ),
    min_size=1,
    max_size=40,
)


@settings(
    max_examples=scaled(10, 200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests=COSTS, parts=st.integers(1, 5))
async def test_costs_add_up_exactly(
    plane: Plane,
    requests: list[tuple[int, int, int | tuple[int, int, int], int]],
    parts: int,
) -> None:
    """To the pico-dollar, however they are loaded, grouped, paged and written; each by its parts,
    or in total where no more is known."""
    example = next(EXAMPLES)
    midnight = datetime(2026, 3, 5, tzinfo=UTC) + timedelta(days=2 * example)
    rows = [
        row(
            number,
            midnight + timedelta(minutes=minute),
            tenant_id=f"ten_{example}_{whose // 2}",
            key_id=f"key_{example}_{whose}",
            metered_tokens=metered,
            **_cost_fields(cost),
        )
        for number, (minute, whose, cost, metered) in enumerate(requests)
    ]
    for part in range(parts):
        await load(plane.database, rows[part::parts] + rows[: part + 1])

    def summed(cost: str, *names: str) -> Counter[tuple[str, ...]]:
        """Pico-dollars by day and fields."""
        sums: Counter[tuple[str, ...]] = Counter()
        for each in rows:
            day = f"{datetime.fromtimestamp(each['admitted_at'], UTC):%Y-%m-%d}"
            sums[(day, *(each[name] for name in names))] += each[cost]
        return sums

    window = {
        "start": midnight.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "end": (midnight + timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    for bucket in ("1d", "1h"):
        told = {"bucket": bucket, "group_by": "tenant,key", "limit": 3}
        found = await ask(plane.client, **window, **told)
        for cost in ("cost", *PARTS):
            seen: Counter[tuple[str, ...]] = Counter()
            for each in found:
                seen[each["start"][:10], each["tenant"], each["key"]] += _pico(each[cost])
            assert seen == summed(cost, "tenant_id", "key_id")
        assert sum(each["metered_tokens"] for each in found) == sum(
            each["metered_tokens"] for each in rows
        )
    answer = await plane.client.get("usage", params=window | {"format": "csv"})
    table = list(csv.DictReader(io.StringIO(answer.text)))
    for cost in ("cost", *PARTS):
        assert sum(_pico(each[cost]) for each in table) == sum(each[cost] for each in rows)
    async with plane.database.acquire() as connection:
        totals = await connection.fetch(
            "SELECT start::text, subject, cost FROM usage_totals"
            " WHERE span = 'day' AND split_part(subject, '_', 2) = $1",
            str(example),
        )
    kept = {(each["start"], each["subject"]): each["cost"] for each in totals}
    assert kept == dict(summed("cost", "tenant_id")) | dict(summed("cost", "key_id"))


def _cost_fields(cost: int | tuple[int, int, int]) -> dict[str, int]:
    if isinstance(cost, int):
        return {"cost": cost}
    return {"cost": sum(cost), **dict(zip(PARTS, cost, strict=True))}


def _pico(dollars: str) -> int:
    return int(Decimal(dollars).scaleb(12))


ROWS_READ = """
SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'usage_hourly'"""


async def test_a_report_reads_what_it_is_about(owner: Database, dsn: str) -> None:
    """Also on a connection that has told of all tenants before, and a page no more than is left."""
    await fetch(
        owner,
        "INSERT INTO usage_hourly"
        " SELECT '2026-03-05Z'::timestamptz + n / 100 * interval '1 hour', 't' || n % 100, 'tiny',"
        " '', 'k', 1, 1, 0, 1, 0, 2, 0, 0, 0, 0 FROM generate_series(0, 19999) n RETURNING 1",
    )
    async with owner.acquire() as connection:
        await connection.execute("ANALYZE usage_hourly")
    start = datetime(2026, 3, 5, tzinfo=UTC)
    end = start + timedelta(hours=200)
    one = await Database.connect(dsn, sees=EVERYTHING, max_size=1)

    async def num_read(after: Cursor | None = None, tenants: list[str] | None = None) -> int:
        """Rows, for one page."""
        asked = UsageQuestion(
            start=start, end=end, width=Width.HOUR, tenants=tenants, told_apart=["tenant"]
        )
        async with one.transaction(readonly=True) as connection:
            before = await connection.fetchval(ROWS_READ)
            assert await report(connection, asked, after, 10)
            return await connection.fetchval(ROWS_READ) - before

    try:
        for _ in range(8):
            # The planner may read an end of the index.
            assert 20_000 <= await num_read() <= 20_010
        assert await num_read(tenants=["t7"]) <= 210
        assert await num_read((end - timedelta(hours=2), "t7", "", "", 0, "")) <= 210
    finally:
        await one.close()


async def test_openais_client_reads_costs(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.tenant("globex")
    ids = await make_usage(plane)
    key = plane.client.headers["authorization"].removeprefix("Bearer ")
    start = int(datetime(2026, 3, 5, tzinfo=UTC).timestamp())
    base_url = plane.url.removesuffix("/admin/v1") + "/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", admin_api_key=key, max_retries=0
    ) as client:
        costs = client.admin.organization.usage.costs
        days = await costs(start_time=start, end_time=start + 2 * 86400)
        assert [len(day.results) for day in days.data] == [1, 0]
        total: Any = days.data[0].results[0]
        assert total.object == "organization.costs.result"
        assert (total.amount.value, total.amount.currency) == (0.000348, "usd")
        assert (total.project_id, total.line_item, total.api_key_id) == (None, None, None)

        one = await costs(
            start_time=start,
            end_time=start + 86400,
            bucket_width="1d",
            group_by=["project_id", "line_item", "api_key_id"],
            api_key_ids=["acme0", "globex0"],
            line_items=["tiny"],
            limit=1,
        )
        results: list[Any] = list(one.data[0].results)
        assert {(each.project_id, each.line_item, each.api_key_id) for each in results} == {
            (ids[name], f"tiny, {kind}", f"{name}0")
            for name in ("acme", "globex")
            for kind in ("input", "cached input", "output")
        }
        assert sum(each.amount.value for each in results) == pytest.approx(0.000168)
        none = await costs(start_time=start, end_time=start + 86400, line_items=["other"])
        assert none.data[0].results == []
        pages = await costs(start_time=start, end_time=start + 86400 * 3, limit=2)
        assert (pages.has_more, pages.next_page) == (True, str(start + 86400 * 2))
        for unsupported in (
            {"group_by": ["user_id"]},
            {"group_by": ["api_source"]},
            {"bucket_width": "1h"},
            {"models": ["tiny"]},
            {"limit": 181},
        ):
            with pytest.raises(openai.BadRequestError, match=r"support|group_by|width|limit"):
                await costs(start_time=start, extra_query=unsupported)


@pytest.mark.full
@pytest.mark.parametrize("report", ["usage/completions", "costs"])
async def test_a_page_ends_before_there_is_too_much_in_it(
    plane: Plane, owner: Database, report: str
) -> None:
    """A bucket is told whole, be it too much by itself; none is left out nor told twice."""
    num_keys = [15_000, 4_999, 2, 0, 25_000, 1, 0]
    start = datetime(2026, 3, 5, tzinfo=UTC)
    for n, keys in enumerate(num_keys):
        async with owner.acquire() as connection:
            await connection.execute(
                "INSERT INTO usage_hourly SELECT $1, 't', 'tiny', '', 'k' || k,"
                " 1, 1, 0, 1, 0, 2, 1, 0, 0, 1 FROM generate_series(1, $2) k",
                *(start + timedelta(days=n), keys),
            )
    url = plane.url.removesuffix("/admin/v1") + f"/v1/organization/{report}"
    first = int(start.timestamp())
    query: dict[str, Any] = {"start_time": first, "end_time": first + 7 * 86400, "limit": 7}
    query |= {"group_by": "api_key_id"}
    pages: list[list[int]] = []
    while True:
        answer = await plane.client.get(url, params=query)
        page = answer.json()
        pages.append([len(bucket["results"]) for bucket in page["data"]])
        if not page["has_more"]:
            break
        query["page"] = page["next_page"]
    assert pages == [[15_000, 4_999], [2, 0], [25_000], [1, 0]]


async def test_line_items_are_the_kinds_of_tokens(plane: Plane) -> None:
    """What no parts are known of is the model's, as a whole; they add up exactly."""
    rows = [row(0), row(1), row(2, model="other"), row(3, cost=5 * 10**6), row(4, cost=0)]
    await load(plane.database, rows)
    client = plane.client
    url = plane.url.removesuffix("/admin/v1") + "/v1/organization/costs"
    start = int(NOON.replace(hour=0).timestamp())

    async def told(*selected: str, group_by: str | None = "line_item") -> dict[str | None, int]:
        """Micro-dollars by line item."""
        query = {"start_time": start, "end_time": start + 86400, "group_by[]": group_by}
        query |= {"line_items[]": list(selected)}
        answer = await client.get(url, params={k: v for k, v in query.items() if v})
        assert answer.status_code == 200, answer.text
        (day,) = answer.json()["data"]
        return {
            each["line_item"]: round(each["amount"]["value"] * 10**6) for each in day["results"]
        }

    tiny = {"tiny, input": 1 + 2, "tiny, output": 2 + 2, "tiny": 5}
    other = {"other, input": 2, "other, cached input": 1, "other, output": 2}
    assert await told() == tiny | other
    assert await told("other") == other
    assert await told("other, cached input,tiny, output") == {
        "other, cached input": 1,
        "tiny, output": 4,
    }
    assert await told(group_by=None) == {None: 3 + 4 + 5 + 5}
    assert await told("tiny, output", "other, output", group_by=None) == {None: 4 + 2}
    assert await told("tiny, nothing") == {}
