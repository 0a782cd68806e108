"""`loraplex quota`, `loraplex price` and what `loraplex usage` says of costs, as processes."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from tests.admin.conftest import Plane
from tests.admin.usage.test_usage import load, row
from tests.loraplex.commands.test_cli import run


async def test_quotas_are_set_piece_by_piece(plane: Plane):
    tenant = await plane.tenant("acme")
    key_id = tenant.headers["authorization"].split("_")[1]
    of_tenant, of_key = ("--tenant", "acme"), ("--key", key_id)

    async def quota(*arguments: str, code: int = 0) -> str:
        return await run(plane, "quota", *arguments, code=code)

    await quota("set", *of_tenant, "--tokens-per-day", "1000", "--spend-per-month", "12.50")
    await quota("set", *of_tenant, "--adapter-bytes", "2MiB", "--cached-weight", "25")
    table = await quota("set", *of_tenant, "--tokens-per-day", "none", "--adapters", "3")
    assert "counts as 25 %" in table and "tokens_per_day" not in table
    shown = json.loads(await quota("show", *of_tenant, "--json"))
    assert shown["tokens_per_day"] is None and shown["spend_per_month"] == "12.50"
    assert (shown["adapter_bytes"], shown["adapters"]) == (2 << 20, 3)
    assert shown["use"]["adapters"]["left"] == 3

    share = await quota("set", *of_tenant, "--weight", "4", "--class", "interactive")
    assert "Requests are of class interactive and weight 4." in share
    await quota("set", *of_tenant, "--weight", "none")
    shown = json.loads(await quota("show", *of_tenant, "--json"))
    assert (shown["weight"], shown["class"], shown["adapters"]) == (1, "interactive", 3)
    assert "class" in await quota("set", *of_tenant, "--class", "urgent", code=2)

    await quota("set", *of_key, "--requests-per-minute", "60")
    (line,) = [one for one in (await quota("show", *of_key)).splitlines() if "minute" in one]
    assert line.split()[:5] == ["requests_per_minute", "0", "60", "60", "0"]
    assert "adapters" in await quota("set", *of_key, "--adapters", "1", code=1)
    assert "decimals" in await quota("set", *of_key, "--spend-per-day", "1e-13", code=1)
    assert (await quota("clear", *of_key)) == f"{key_id} has no limits\n"
    assert len((await quota("show", *of_key)).splitlines()) == 1
    cleared = json.loads(await quota("show", *of_key, "--json"))
    assert (cleared["requests_per_minute"], cleared["use"]) == (None, {})

    own = tenant.headers["authorization"].removeprefix("Bearer ")
    assert "spend_per_month" in await run(plane, "quota", "show", *of_tenant, LORAPLEX_KEY=own)
    assert "spend_per_month" in await run(plane, "quota", "show", LORAPLEX_KEY=own)
    assert "give --tenant NAME" in await quota("show", code=1)
    lifted = ("quota", "clear", *of_tenant)
    assert "lacks the scope" in await run(plane, *lifted, code=1, LORAPLEX_KEY=own)
    assert "--tenant or --key" in await quota("show", *of_tenant, *of_key, code=2)
    assert "give a limit" in await quota("set", *of_tenant, code=2)
    assert "--adapters: " in await quota("set", *of_tenant, "--adapters", "few", code=2)


async def test_prices_and_costs(plane: Plane, base: str):
    paid = ("--input", "2.50", "--output", "10")
    assert "2.50" in await run(plane, "price", "set", "tiny", *paid)
    await run(plane, "price", "set", "tiny", *paid, "--cached-input", "0.000001")
    (price,) = json.loads(await run(plane, "price", "list", "--json"))
    assert (price["input"], price["cached_input"], price["output"]) == ("2.50", "0.000001", "10.00")
    short = await run(plane, "price", "set", "tiny", "--input", ".5", "--output", "1e-6", "--json")
    assert (json.loads(short)["input"], json.loads(short)["output"]) == ("0.50", "0.000001")
    for wrong in ("$1", ".", "1e", "nan"):
        told = await run(plane, "price", "set", "tiny", *paid, "--input", wrong, code=2)
        assert f"{wrong!r} is not an amount of dollars" in told
    assert "no base model" in await run(plane, "price", "set", "other", *paid, code=1)
    assert await run(plane, "price", "remove", "tiny") == "future requests of tiny are free\n"
    assert json.loads(await run(plane, "price", "list", "--json")) == []

    now = datetime.now(UTC)
    rows = [row(n, now, adapter="bot", adapter_version=n + 1, cost=10**n) for n in range(3)]
    await load(plane.database, rows)
    by_version = ("usage", "--group-by", "adapter,adapter_version")
    found = json.loads(await run(plane, *by_version, "--json"))
    costs = {each["adapter_version"]: each["cost"] for each in found}
    assert costs == {1: "0.000000000001", 2: "0.00000000001", 3: "0.0000000001"}
    assert "0.000000000111" in await run(plane, "usage", COLUMNS="200")
