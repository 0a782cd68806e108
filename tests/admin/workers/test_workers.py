"""Workers and where base models are, over real HTTP: what gateways reported, and what is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.store.folder import LocalStore
from admin.upkeep.reaper import Reaper
from admin.workers.workers import FORGOTTEN_S, LOST_S, leave, register_worker
from store.database import EVERYTHING, Database
from store.queries import catalog_generation, load_catalog, sql
from tests.admin.audit.test_audit import entries
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import report_worker

ADAPTERS = [
    {"digest": "1" * 64, "tier": "device", "num_bytes": 5, "leases": 2, "pinned": True},
    {"digest": "2" * 64, "tier": "host", "num_bytes": 7, "leases": 0, "pinned": False},
    {"digest": "3" * 64, "tier": "host", "num_bytes": 9, "leases": 0, "pinned": False},
]
STATUS: dict[str, Any] = {
    "draining": False,
    "adapters": ADAPTERS,
    "arena_bytes": 64,
    "extents": "kw.a",
    "tenants": [{"tenant": "ten_1", "kv_bytes": 32, "adapter_bytes": 16}],
    "settings": {"memory": "64"},
    "step": 12,
    "tokens_per_s": 3.5,
    "of_a_later_version": [1],
}


async def generation(database: Database) -> int:
    async with database.acquire() as connection:
        return await catalog_generation(connection)


async def listed(plane: Plane) -> dict[str, dict[str, Any]]:
    answer = await plane.client.get("workers")
    assert answer.status_code == 200, answer.text
    return {worker["id"]: worker for worker in answer.json()["data"]}


async def test_a_worker_is_shown_as_it_says(plane: Plane):
    await report_worker(plane.database, "w-1", "b" * 64, gateway="gw-7", **STATUS)
    shown = (await plane.client.get("workers/w-1")).json()
    assert (shown["state"], shown["address"]) == ("ready", "unix:/run/w-1.sock")
    assert (shown["reported_by"], shown["is_registered"]) == ("gw-7", False)
    assert [model["digest"] for model in shown["models"]] == ["b" * 64]
    tiers = {tier: [a["digest"][0] for a in held] for tier, held in shown["adapters"].items()}
    assert tiers == {"device": ["1"], "host": ["2", "3"]}
    assert shown["adapters"]["device"][0]["leases"] == 2
    names = ("arena_bytes", "extents", "tenants", "settings", "step", "tokens_per_s")
    assert {name: shown[name] for name in names} == {name: STATUS[name] for name in names}
    (brief,) = (await listed(plane)).values()
    assert brief.items() <= shown.items()
    assert (brief["num_running"], brief["num_waiting"], brief["resident"]) == (1, 2, ["bbbb"])
    assert problem(await plane.client.get("workers/w-2"), 404)["code"] == "worker_not_found"


async def test_workers_come_in_pages(plane: Plane):
    for number in range(5):
        await report_worker(plane.database, f"w-{number}")
    page = (await plane.client.get("workers", params={"after": "w-1", "limit": 2})).json()
    assert ([worker["id"] for worker in page["data"]], page["has_more"]) == (["w-2", "w-3"], True)


async def test_one_of_several_gateways_writes_each_status(plane: Plane):
    """It goes on as long as it has news; then any other does."""

    async def report(gateway: str, step: int) -> tuple[str, int]:
        row = {"id": "w-1", "address": "unix:/w", "status": {"step": step}}
        async with plane.database.acquire() as connection:
            await connection.execute(sql["workers_report"], gateway, [row])
        shown = (await plane.client.get("workers/w-1")).json()
        return shown["reported_by"], shown["step"]

    assert await report("gw-1", 1) == ("gw-1", 1)
    assert await report("gw-2", 2) == ("gw-1", 1)
    assert await report("gw-1", 3) == ("gw-1", 3)
    async with plane.database.acquire() as connection:
        await connection.execute("UPDATE workers SET reported_at = now() - interval '2 seconds'")
    assert await report("gw-2", 4) == ("gw-2", 4)


async def test_who_is_not_heard_of_is_lost_and_then_gone(plane: Plane):
    reaper = Reaper(plane.database, LocalStore(plane.store))
    for worker_id, age_s in (("here", 0), ("lost", LOST_S + 1), ("gone", FORGOTTEN_S + 1)):
        await report_worker(plane.database, worker_id, "b" * 64, seconds_ago=age_s)
    await register_worker(plane.database, "new", "tcp://127.0.0.1:1", 60)
    states = {worker_id: worker["state"] for worker_id, worker in (await listed(plane)).items()}
    assert states == {"here": "ready", "lost": "lost", "gone": "lost", "new": "unreached"}
    before = await generation(plane.database)
    await reaper.reap()
    assert (await listed(plane)).keys() == {"here", "lost", "new"}
    # No gateway has to look again for one that was never registered.
    assert await generation(plane.database) == before


async def test_a_lease_that_is_renewed_keeps_a_worker_found(plane: Plane):
    reaper = Reaper(plane.database, LocalStore(plane.store))
    await register_worker(plane.database, "w-1", "tcp://127.0.0.1:1", 60)
    registered = await generation(plane.database)
    await register_worker(plane.database, "w-1", "tcp://127.0.0.1:1", 60)
    await report_worker(plane.database, "w-1", seconds_ago=FORGOTTEN_S + 1)
    await reaper.reap()
    assert await known(plane) == ["w-1"]
    assert await generation(plane.database) == registered, "a renewal is no change of the catalog"
    async with plane.database.acquire() as connection:
        await connection.execute("UPDATE workers SET leased_until = now() - interval '1 minute'")
    await reaper.reap()
    assert await known(plane) == []
    assert await generation(plane.database) > registered
    # Its command has only been cut off: with the next renewal it is there again.
    await register_worker(plane.database, "w-1", "tcp://127.0.0.1:1", 60)
    assert await known(plane) == ["w-1"]
    await leave(plane.database, "w-1")
    assert (await known(plane), await listed(plane)) == ([], {})


async def known(plane: Plane) -> list[str]:
    """What gateways are told to connect to."""
    async with plane.database.acquire() as connection:
        snapshot = await load_catalog(connection)
    return [worker.id for worker in snapshot.workers if worker.is_registered]


async def test_a_drain_is_wanted_once_and_undone(plane: Plane):
    await report_worker(plane.database, "w-1")
    before = await generation(plane.database)
    drained = await plane.client.post("workers/w-1/drain")
    assert drained.status_code == 200, drained.text
    # The worker has not heard of it yet.
    assert (drained.json()["drain_wanted"], drained.json()["state"]) == (True, "ready")
    assert await generation(plane.database) > before
    assert await wanted(plane) == {"w-1": True}
    before = await generation(plane.database)
    assert (await plane.client.post("workers/w-1/drain")).status_code == 200
    assert await generation(plane.database) == before
    await report_worker(plane.database, "w-1", draining=True)
    assert (await listed(plane))["w-1"]["state"] == "draining"
    assert (await plane.client.delete("workers/w-1/drain")).json()["drain_wanted"] is False
    assert await wanted(plane) == {"w-1": False}
    changes = [entry for entry in await entries(plane.database) if entry.object == "w-1"]
    assert [(entry.action, entry.details) for entry in changes] == [
        ("worker.update", {"draining": [None, True]}),
        ("worker.update", {"draining": [True, False]}),
    ]
    assert all(entry.key_id != "system" for entry in changes)


async def wanted(plane: Plane) -> dict[str, bool | None]:
    async with plane.database.acquire() as connection:
        snapshot = await load_catalog(connection)
    return {worker.id: worker.draining for worker in snapshot.workers}


async def test_a_model_is_shown_with_where_it_is(plane: Plane, base: str):
    await report_worker(plane.database, "w-1", base, "d" * 64)
    await report_worker(plane.database, "w-2", "d" * 64)
    await report_worker(plane.database, "w-3", base, seconds_ago=LOST_S + 1)
    answer = await plane.client.get("models/tiny")
    shown = answer.json()
    (state,) = shown["workers"]
    assert (state["worker"], state["tier"], state["num_bytes"]) == ("w-1", "device", 8)
    assert (state["num_swaps"], state["load_s"], state["num_waiting"]) == (1, 0.5, 2)
    assert state["idle_since"] < state["reported_at"]
    # What the workers do is no change of the model.
    await report_worker(plane.database, "w-2", base)
    assert (await plane.client.get("models/tiny")).headers["etag"] == answer.headers["etag"]
    tenant = await plane.tenant("acme")
    assert (await tenant.get("models/tiny")).json() == shown | {"workers": []}


async def test_a_model_is_pinned_unloaded_and_left_to_its_use(plane: Plane, base: str):
    tag = (await plane.client.get("models/tiny")).headers["etag"]
    for residency in ("pinned", "unloaded", "auto"):
        headers = {"if-match": tag}
        body = {"residency": residency}
        answer = await plane.client.patch("models/tiny", json=body, headers=headers)
        assert answer.json()["residency"] == residency, answer.text
        async with plane.database.acquire() as connection:
            (model,) = (await load_catalog(connection)).models
        assert model.residency == residency
        tag = answer.headers["etag"]
    changes = [e for e in await entries(plane.database) if e.action == "model.update"]
    assert [entry.details["residency"] for entry in changes] == [
        ["auto", "pinned"],
        ["pinned", "unloaded"],
        ["unloaded", "auto"],
    ]


async def test_registering_again_leaves_a_model_where_it_is(plane: Plane, base: str):
    await plane.client.patch("models/tiny", json={"residency": "pinned"})
    body = {"name": "tiny", "digest": base, "max_model_len": 64}
    again = await plane.client.post("models", json=body)
    assert (again.json()["residency"], again.json()["max_model_len"]) == ("pinned", 64)


@pytest.mark.parametrize("residency", ["loaded", None, True, ""])
async def test_a_residency_is_one_of_three(plane: Plane, base: str, residency: Any):
    answer = await plane.client.patch("models/tiny", json={"residency": residency})
    if residency is None:
        assert answer.json()["residency"] == "auto"
    else:
        assert "residency" in str(problem(answer, 400)["message"])


async def test_a_model_that_a_worker_can_never_serve_is_shown_with_the_reason(
    plane: Plane, base: str
):
    figures = ("num_bytes", "num_swaps", "num_running", "num_waiting", "idle_s", "load_s")
    idle: dict[str, Any] = dict.fromkeys(figures, 0) | {"error": ""}
    never = idle | {"digest": base, "name": "tiny", "tier": "unsatisfiable"}
    never["error"] = "needs 2.00 GiB"
    here = idle | {"digest": "d" * 64, "name": "other", "tier": "device"}
    await report_worker(plane.database, "w-1", models=[never])
    await report_worker(plane.database, "w-2", models=[never, here])
    shown = await listed(plane)
    assert [worker["state"] for worker in shown.values()] == ["unsatisfiable", "ready"]
    assert {w["reason"] for w in shown.values()} == {"tiny: unsatisfiable: needs 2.00 GiB"}
    (model,) = (await plane.client.get("models")).json()["data"]
    states = [(state["worker"], state["tier"], state["error"]) for state in model["workers"]]
    assert states == [(w, "unsatisfiable", "needs 2.00 GiB") for w in ("w-1", "w-2")]
    tenant = await plane.tenant("acme")
    assert (await tenant.get("models")).json()["data"] == [model | {"workers": []}]


async def test_a_worker_that_is_not_reached_is_shown_with_the_reason(plane: Plane):
    """As where its certificate is not for its address; a gateway that reaches it takes it back."""
    address, failure = "tcp://10.0.0.11:9000", "certificate is not valid for '10.0.0.11'"
    await register_worker(plane.database, "w-1", address, 60.0)
    told = [{"address": address, "failure": failure}]
    async with plane.database.transaction(EVERYTHING) as connection:
        await connection.execute(sql["workers_not_reached"], told)
    shown = (await listed(plane))["w-1"]
    assert (shown["state"], shown["reason"]) == ("unreached", failure)
    await report_worker(plane.database, "w-1")
    async with plane.database.transaction(EVERYTHING) as connection:
        await connection.execute(sql["workers_not_reached"], told)
    shown = (await listed(plane))["w-1"]
    assert (shown["state"], shown["reason"]) == ("ready", "")
