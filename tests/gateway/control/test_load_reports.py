"""What a gateway tells of its last minute, in a real Postgres."""

from __future__ import annotations

from typing import Any

from tests.gateway.live import Live
from tests.waiting import eventually


async def told(live: Live) -> dict[str, Any]:
    rows = await live.fetch("SELECT load FROM gateway_load")
    return rows[0]["load"] if rows else {}


async def test_requests_tenants_and_refusals_are_told(live: Live) -> None:
    await live.make_ready("a")
    async with live.worker, live.gateway() as plane:
        await eventually(lambda: _is_told(live))
        before = await told(live)
        assert await plane.serves("bot")
        assert (await plane.complete("nothing-of-that-name")).status_code == 404

        async def is_counted() -> bool:
            load = await told(live)
            has_changed = load["models"] != before["models"] and bool(_num_requests(load))
            return has_changed and "model_not_found" in load["refusals"]

        await eventually(is_counted)
        load = await told(live)
        (model,) = load["models"]
        assert model["requests"] >= 1 and model["prompt_tokens"] > 0
        assert sum(number for _, number in model["ttft"]) == model["requests"]
        (tenant,) = [each for each in load["tenants"] if each["tenant"] == live.tenant_id]
        assert tenant["requests"] == 1
    assert await told(live) == {}


def _num_requests(load: dict[str, Any]) -> int:
    """Requests of all tenants that have ended."""
    return sum(each["requests"] for each in load["tenants"])


async def _is_told(live: Live) -> bool:
    return await told(live) != {}


async def test_the_last_failure_of_each_code_is_told(live: Live) -> None:
    async with live.gateway() as plane:
        answers = [await plane.complete("tiny") for _ in range(2)]
        assert {answer.status_code for answer in answers} == {503}
        code = answers[-1].json()["error"]["code"]

        async def is_told() -> bool:
            errors = (await told(live)).get("errors", [])
            newest = answers[-1].headers["x-request-id"]
            return any(e["code"] == code and e["request_id"] == newest for e in errors)

        await eventually(is_told)
