"""One picture of what runs: from what workers and gateways reported, over real HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from admin.overview.latencies import merged, percentiles
from store.gateway_load import Latencies
from store.queries import sql
from tests.admin.conftest import Plane
from tests.admin.lifecycle import report, report_worker
from tests.admin.workers.test_workers import STATUS


def load(**changes: Any) -> dict[str, Any]:
    model = {"model": "tiny", "requests": 30, "failed": 1, "prompt_tokens": 600}
    model |= {"cached_tokens": 60, "completion_tokens": 300, "ttft": [[0.5, 30]]}
    return {"seconds": 30.0, "requests_in_flight": 2, "models": [model]} | changes


async def tell(plane: Plane, gateway: str, told: dict[str, Any], *, seconds_ago: int = 0) -> None:
    async with plane.database.transaction() as connection:
        await report(connection, gateway, 1, {}, seconds_ago=seconds_ago)
        await connection.execute(sql["gateway_load_report"], gateway, told)


async def overview(plane: Plane) -> dict[str, Any]:
    answer = await plane.client.get("overview")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_nothing_runs(plane: Plane):
    shown = await overview(plane)
    assert shown["workers"] == shown["models"] == shown["tenants"] == shown["troubles"] == []
    assert (shown["requests_per_s"], shown["ttft"], shown["num_gateways"]) == (0, None, 0)


async def test_gateways_add_up(plane: Plane, base: str):
    await plane.client.post("tenants", json={"name": "acme"})
    acme = (await plane.client.get("tenants/acme")).json()["id"]
    error = {"code": "worker_lost", "at": 1e9, "request_id": "req_1", "number": 3}
    used = {"tenant": acme, "tokens": 900, "requests": 30}
    await tell(plane, "gw-1", load(refusals={"a": 1, "b": 2}, tenants=[used], errors=[error]))
    # Of half the time.
    later = load(seconds=15.0, refusals={"a": 4}, errors=[error | {"at": 2e9}])
    await tell(plane, "gw-2", later)
    await tell(plane, "gw-9", load(), seconds_ago=60)
    shown = await overview(plane)
    assert (shown["num_gateways"], shown["requests_in_flight"]) == (2, 4)
    assert (shown["requests_per_s"], shown["prompt_tokens_per_s"]) == (3.0, 60.0)
    assert list(shown["refusals"].items()) == [("a", 5), ("b", 2)]
    (model,) = shown["models"]
    assert (model["name"], model["failed"], model["cached_tokens_per_s"]) == ("tiny", 2, 6.0)
    assert model["ttft"]["p50"] == 0.25
    (tenant,) = shown["tenants"]
    assert (tenant["name"], tenant["tokens_per_s"], tenant["requests_per_s"]) == ("acme", 30, 1)
    newest, oldest = shown["troubles"]
    assert (newest["place"], oldest["place"]) == ("gw-2", "gw-1")
    assert oldest["at"] == "2001-09-09T01:46:40Z" and oldest["number"] == 3


async def test_workers_tell_of_memory_tiers_and_faults(plane: Plane, base: str):
    fault = {"digest": "4" * 64, "tier": "store", "error": "adapter.checksum", "message": "spoilt"}
    status = STATUS | {"adapters": [*STATUS["adapters"], fault]}
    await report_worker(plane.database, "w-1", base, **status)
    await report_worker(plane.database, "w-2", base, seconds_ago=20, **STATUS)
    shown = await overview(plane)
    worker, lost = shown["workers"]
    assert worker["memory"] == {"free": 16, "kv": 16, "adapters": 16, "weights": 16}
    assert worker["adapters"]["host"] == {"number": 2, "bytes": 16}
    assert (worker["num_running"], worker["num_waiting"], worker["state"]) == (1, 2, "ready")
    # What a lost worker said is not what is.
    assert (lost["state"], lost["num_running"], lost["memory"]["kv"]) == ("lost", 0, 0)
    assert shown["models"][0]["num_on_device"] == 1
    (tenant,) = shown["tenants"]
    assert (tenant["id"], tenant["name"], tenant["kv_bytes"]) == ("ten_1", "", 32)
    codes = {(trouble["place"], trouble["code"]) for trouble in shown["troubles"]}
    assert codes == {("w-2", "lost"), ("4" * 64, "adapter.checksum")}


async def test_a_gateway_that_left_takes_its_load_along(plane: Plane):
    await tell(plane, "gw-1", load())
    async with plane.database.transaction() as connection:
        await connection.execute(sql["gateway_leave"], "gw-1")
        # It has no row to belong to.
        await connection.execute(sql["gateway_load_report"], "gw-1", load())
        assert await connection.fetchval("SELECT count(*) FROM gateway_load") == 0


@pytest.mark.parametrize(
    ("latencies", "p50", "p99"),
    [
        ([(0.1, 1)], 0.05, 0.099),
        ([(0.1, 50), (0.2, 0), (0.4, 50)], 0.1, 0.396),
        ([(0.1, 0), (0.2, 10)], 0.15, 0.199),
    ],
)
def test_percentiles_are_interpolated(latencies: Latencies, p50: float, p99: float):
    found = percentiles(latencies)
    assert found is not None
    assert (found.p50, found.p99) == pytest.approx((p50, p99))


def test_buckets_of_several_are_added():
    assert merged([[(0.1, 1), (0.2, 2)], [(0.1, 3)]]) == [(0.1, 4), (0.2, 2)]
    assert percentiles(merged([[], [(0.1, 0)]])) is None
