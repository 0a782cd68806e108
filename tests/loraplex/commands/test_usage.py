"""`loraplex usage`, in a process of its own, against a served admin plane."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.admin.conftest import Plane
from tests.admin.usage.test_usage import load, row
from tests.loraplex.commands.test_cli import run


async def test_usage_by_tenant_and_time(plane: Plane) -> None:
    own = (await plane.tenant("acme")).headers["authorization"].removeprefix("Bearer ")
    await plane.tenant("globex")
    ids = {each["name"]: each["id"] for each in (await plane.client.get("tenants")).json()["data"]}
    now = datetime.now(UTC)
    ages = {"acme": timedelta(hours=1), "globex": timedelta(days=3)}
    rows = [
        row(number, now - ages[name], tenant_id=ids[name], adapter="bot")
        for number, name in enumerate(ages)
    ]
    await load(plane.database, rows)
    (acme, globex) = sorted(
        json.loads(await run(plane, "usage", "--json")), key=lambda each: each["prompt_tokens"]
    )
    assert (acme["tenant"], acme["adapter"], acme["requests"]) == (ids["acme"], "bot", 1)
    assert (globex["tenant"], globex["prompt_tokens"]) == (ids["globex"], 2)
    recent = json.loads(await run(plane, "usage", "--since", "2h", "--bucket", "1h", "--json"))
    assert [each["tenant"] for each in recent] == [ids["acme"]]
    before = await run(plane, "usage", "--since", "5d", "--end", "2d", "--json")
    assert [each["tenant"] for each in json.loads(before)] == [ids["globex"]]
    month = (now - timedelta(days=40)).date().isoformat()
    assert json.loads(await run(plane, "usage", "--end", month, "--json")) == []
    wrong = await run(plane, "usage", "--since", "1d", "--end", "2d", code=1)
    assert "start must be before end" in wrong
    other = await run(plane, "usage", "--tenant", "globex", "--group-by", "model", "--json")
    assert [(each["model"], each["requests"]) for each in json.loads(other)] == [("tiny", 1)]
    table = await run(plane, "usage", LORAPLEX_KEY=own, COLUMNS="160")
    assert "acme" in table and "bot" in table and "globex" not in table
    for option in ("--since", "--end"):
        for moment in ("soon", "0001-01-01T00:00:00+05:00"):
            assert "neither" in await run(plane, "usage", option, moment, code=2)
    table = await run(plane, "usage", "--group-by", "tenant, adapter", COLUMNS="160")
    assert "acme" in table and "bot" in table


async def test_a_wrong_price_is_corrected(plane: Plane) -> None:
    """`usage` shows what was credited where anything was, and `usage credits` the reason."""
    await plane.tenant("acme")
    (tenant,) = (await plane.client.get("tenants")).json()["data"]
    await load(plane.database, [row(1, datetime.now(UTC), tenant_id=tenant["id"])])
    assert "credited" not in await run(plane, "usage")
    credit = ("usage", "credit", "tiny", "--since", "2h", "--reason", "wrong price")
    prices = ("--input", "0.50", "--output", "0.25")
    made = json.loads(await run(plane, *credit, *prices, "--id", "c1", "--json"))
    assert (made["cost_before"], made["cost_after"]) == ("0.000004", "0.0000015")
    table = (await run(plane, "usage")).split("\n")
    shown = dict(zip(table[0].split("\t"), table[1].split("\t"), strict=True))
    assert (shown["cost"], shown["credited"]) == ("0.0000015", "0.0000025")
    assert "wrong price" in await run(plane, "usage", "credits")
    wrong = await run(plane, *credit, "--input", "9", "--output", "9", code=1)
    assert "a credit can only lower costs" in wrong
