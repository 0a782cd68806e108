"""A wrong price is corrected once, in reports, in what counts against limits and in the log."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from tests.admin.audit.test_audit import entries, verified
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.usage.test_usage import ask, fetch, load, row

HOUR = datetime(2026, 3, 5, 9, tzinfo=UTC)
WRONG = 10**6
"""Pico-dollars of each token of `row`: a dollar per million tokens."""
TOTALS = "SELECT subject, span, start, cost FROM usage_totals ORDER BY 1, 2, 3"
RIGHT = {"model": "tiny", "input": "0.50", "cached_input": "0.25", "output": "1"}
BODY = {
    **RIGHT,
    "start": "2026-03-05T09:10:00Z",
    "end": "2026-03-05T10:00:00Z",
    "reason": "typed 1 for 0.50",
}


async def loaded(plane: Plane) -> dict[str, str]:
    """Two requests of acme and one of globex in the hour, one of acme after it; tenants' ids."""
    for name in ("acme", "globex"):
        await plane.tenant(name)
    found = (await plane.client.get("tenants")).json()["data"]
    ids = {each["name"]: each["id"] for each in found}
    places = [("acme", 0), ("acme", 59), ("globex", 30), ("acme", 60)]
    rows = [
        row(4 + n, HOUR + timedelta(minutes=minutes), tenant_id=ids[name])
        for n, (name, minutes) in enumerate(places)
    ]
    await load(plane.database, rows)
    return ids


async def sums(plane: Plane, **query: Any) -> list[tuple[str, str, str]]:
    hours = await ask(plane.client, bucket="1h", group_by="tenant", **query)
    return [(each["tenant_name"], each["cost"], each["credited"]) for each in hours]


async def make(plane: Plane, name: str = "c1", **changes: Any) -> dict[str, Any]:
    answer = await plane.client.put(f"usage/credits/{name}", json=BODY | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_credit_sets_costs_to_what_the_right_price_makes_them(plane: Plane) -> None:
    """Of the whole hour and of no other, in exact parts; an audit entry has the reason."""
    ids = await loaded(plane)
    before = await fetch(plane.database, TOTALS)
    made = await make(plane)
    # acme: 3 + 3 prompt tokens computed, 2 + 2 cached, 2 + 2 emitted; globex: 4, 3 and 2.
    acme, globex = Decimal("0.0000085"), Decimal("0.00000475")
    assert (Decimal(made["cost_before"]), Decimal(made["cost_after"])) == (
        Decimal("0.000024"),
        acme + globex,
    )
    assert {name: made[name] for name in ("requests", "tenant_id", "since", "until")} == {
        "requests": 3,
        "tenant_id": None,
        "since": "2026-03-05T09:00:00Z",
        "until": "2026-03-05T10:00:00Z",
    }
    hours = await ask(plane.client, bucket="1h", group_by="tenant")
    costs = {(each["start"][11:13], each["tenant_name"]): each for each in hours}
    for name, cost, credited in (
        ("acme", acme, Decimal("0.0000065")),
        ("globex", globex, Decimal("0.00000425")),
    ):
        shown = costs["09", name]
        assert (Decimal(shown["cost"]), Decimal(shown["credited"])) == (cost, credited)
        parts = ("input_cost", "cached_input_cost", "output_cost")
        assert sum(Decimal(shown[part]) for part in parts) == cost
    assert (costs["10", "acme"]["cost"], costs["10", "acme"]["credited"]) == ("0.00001", "0.00")
    taken = {ids["acme"]: 6_500_000, ids["globex"]: 4_250_000, "keykeykeykey": 10_750_000}
    assert await fetch(plane.database, TOTALS) == [
        (subject, span, start, cost - taken[subject]) for subject, span, start, cost in before
    ]
    (entry,) = [each for each in await entries(plane.database) if each.action == "credit.create"]
    assert (entry.object, entry.details["reason"]) == ("c1", BODY["reason"])
    assert (await verified(plane.database)).broken is None


async def test_an_id_is_used_once(plane: Plane) -> None:
    await loaded(plane)
    first, *others = await asyncio.gather(*(make(plane) for _ in range(4)))
    assert others == [first] * 3
    after = await sums(plane)
    refused = await plane.client.put("usage/credits/c1", json=BODY | {"reason": "another"})
    assert problem(refused, 409)["param"] == "id"
    assert await sums(plane) == after
    assert (await plane.client.get("usage/credits/c1")).json() == first
    listed = (await plane.client.get("usage/credits")).json()
    assert (listed["data"], listed["has_more"]) == ([first], False)
    assert problem(await plane.client.get("usage/credits/c2"), 404)["code"] == "credit_not_found"


async def test_a_later_credit_covers_late_usage_and_replaces_the_first(plane: Plane) -> None:
    await loaded(plane)
    await make(plane, input="0", cached_input="0", output="0")
    await load(plane.database, [row(20, HOUR, tenant_id="ten_late00000000")])
    again = await make(plane, "c2")
    late = Decimal("0.0000055") + Decimal("0.0000025") + Decimal("0.000002")
    assert Decimal(again["cost_after"]) == Decimal("0.00001325") + late
    costs = await sums(plane, end="2026-03-05T10:00:00Z")
    assert sum(Decimal(cost) + Decimal(credited) for _, cost, credited in costs) == Decimal(
        "0.000047"
    )


async def test_one_tenant_may_be_credited_and_deleted(plane: Plane) -> None:
    ids = await loaded(plane)
    assert (await plane.client.delete("tenants/globex")).is_success
    made = await make(plane, tenant=ids["globex"])
    assert (made["tenant_id"], made["requests"]) == (ids["globex"], 1)
    shown = {name: credited for name, _, credited in await sums(plane)}
    assert shown == {"acme": "0.00", "globex": "0.00000425"}


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"output": "3"}, 400, "2026-03-05T09:00Z"),
        ({"model": "other"}, 404, "usage_not_found"),
        ({"end": "2026-03-05T09:10:00Z"}, 400, "end"),
        ({"end": "2026-04-05T09:10:01Z"}, 400, "31 days"),
        ({"start": "0001-01-01T00:00:00+14:00"}, 400, "start"),
        ({"start": "2026-03-05T09:00:00"}, 400, "start"),
        ({"reason": ""}, 400, "reason"),
        ({"cached_input": "0.6"}, 400, "cached_input"),
        ({"tenant": "nobody"}, 404, "tenant_not_found"),
        ({"color": 1}, 400, "color"),
    ],
)
async def test_a_refused_credit_changes_nothing(
    plane: Plane, change: dict[str, Any], status: int, named: str
) -> None:
    await loaded(plane)
    before = await sums(plane)
    answer = await plane.client.put("usage/credits/c1", json=BODY | change)
    refused = problem(answer, status)
    assert named in f"{refused['code']} {refused['param']} {refused['message']}"
    assert await sums(plane) == before
    assert (await plane.client.get("usage/credits")).json()["data"] == []


async def test_usage_loads_while_credits_are_made(plane: Plane) -> None:
    """Neither waits for the other in turn, and every row counts."""
    await loaded(plane)
    rows = [row(100 + n, HOUR, tenant_id=f"ten_{n % 5}") for n in range(60)]

    async def load_all(part: int) -> None:
        for n in range(part, len(rows), 3):
            await load(plane.database, [rows[n]])

    async def credit_all() -> None:
        for n in range(8):
            await make(plane, f"again-{n}")

    await asyncio.gather(*(load_all(part) for part in range(3)), credit_all())
    final = await make(plane, "final")
    assert final["requests"] == 63
    (total,) = await fetch(
        plane.database,
        "SELECT sum(cost), sum(credited) FROM usage_hourly WHERE hour = '2026-03-05T09:00Z'",
    )
    recorded = await fetch(
        plane.database, "SELECT sum(cost) FROM usage WHERE admitted_at < '2026-03-05T10:00Z'"
    )
    assert total[0] + total[1] == recorded[0][0]
    days = await fetch(
        plane.database,
        "SELECT sum(cost) FROM usage_totals WHERE span = 'day' AND subject LIKE 'ten_%'",
    )
    hours = await fetch(plane.database, "SELECT sum(cost) FROM usage_hourly")
    assert days == hours
