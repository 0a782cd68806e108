"""Aliases: promote, split, roll back, pin; one step each, and a history of it."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from admin.adapters import aliases
from store.database import Database
from store.errors import ApiError, Conflict, Invalid, NotFound
from store.queries import load_catalog
from store.records import CanaryPolicy
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import MANIFEST, add, make_ready, make_tenant, prove_all


@pytest.fixture
async def tenant_id(database: Database) -> str:
    """`bot` with the ready versions 1, 2 and 3; `prod` is 1."""
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b", "c")
    return tenant_id


async def test_promotions_are_kept_with_who_and_when(database: Database, tenant_id: str):
    async with database.transaction() as connection:
        for version in (2, 2, 3):
            await aliases.set_alias(connection, tenant_id, "bot", "prod", version, "somekey")
        history = await aliases.alias_history(connection, tenant_id, "bot", "prod")
    assert [(m.version, m.previous, m.reason, m.changed_by) for m in history] == [
        (3, 2, "promote", "somekey"),
        (2, 1, "promote", "somekey"),
        (1, None, "first", "uploader"),
    ]


async def test_an_alias_points_to_ready_versions_alone(database: Database, tenant_id: str):
    async with database.transaction() as connection:
        await add(connection, tenant_id, "d")
        with pytest.raises(Conflict, match="version 4 is proving, not ready"):
            await aliases.set_alias(connection, tenant_id, "bot", "prod", 4)
        with pytest.raises(NotFound, match="no version 9"):
            await aliases.set_alias(connection, tenant_id, "bot", "prod", 9)
        with pytest.raises(Conflict, match="version 4 is proving"):
            await aliases.set_canary(connection, tenant_id, "bot", "prod", {1: 9, 4: 1}, None)
    with pytest.raises(Invalid):
        async with database.transaction() as connection:
            await aliases.set_alias(connection, tenant_id, "bot", "7", 1)


async def test_a_canary_set_goes_back_to_its_stable_version(database: Database, tenant_id: str):
    policy = CanaryPolicy(window_s=60, max_error_rate=0.1)
    async with database.transaction() as connection:
        await aliases.set_canary(connection, tenant_id, "bot", "prod", {1: 90, 2: 10}, policy, "k")
    async with database.acquire() as connection:
        split = (await load_catalog(connection)).aliases[0]
    async with database.transaction() as connection:
        await aliases.roll_back(connection, tenant_id, "bot", "prod", "k")
        back = await aliases.find_alias(connection, tenant_id, "bot", "prod")
        await aliases.roll_back(connection, tenant_id, "bot", "prod", "k")
        again = await aliases.find_alias(connection, tenant_id, "bot", "prod")
        await aliases.set_alias(connection, tenant_id, "bot", "prod", 2, "k")
        done = await aliases.find_alias(connection, tenant_id, "bot", "prod")
        history = await aliases.alias_history(connection, tenant_id, "bot", "prod")
    assert (split.version, split.canary, split.policy) == (1, {1: 90, 2: 10}, policy)
    assert (back.version, back.canary, back.policy) == (1, None, None)
    assert (again.version, again.canary, again.policy) == (1, {1: 90, 2: 10}, policy)
    assert (done.version, done.canary) == (2, None)
    assert [(m.reason, m.canary) for m in history] == [
        ("promote", None),
        ("rollback", {1: 90, 2: 10}),
        ("rollback", None),
        ("canary", {1: 90, 2: 10}),
        ("first", None),
    ]


async def test_a_canary_set_has_its_stable_version_and_a_size(database: Database, tenant_id: str):
    async with database.transaction() as connection:
        with pytest.raises(Conflict, match="points to version 1, which must be in the set"):
            await aliases.set_canary(connection, tenant_id, "bot", "prod", {2: 1, 3: 1}, None)
        with pytest.raises(NotFound):
            await aliases.set_canary(connection, tenant_id, "bot", "new", {1: 1, 2: 1}, None)
        for size in (1, 9):
            weights = dict.fromkeys(range(1, size + 1), 1)
            with pytest.raises(Invalid, match="2 to 8"):
                await aliases.set_canary(connection, tenant_id, "bot", "prod", weights, None)


async def test_there_may_be_nothing_to_roll_back_to(database: Database, tenant_id: str):
    async with database.transaction() as connection:
        with pytest.raises(Conflict, match="never pointed to anything else"):
            await aliases.roll_back(connection, tenant_id, "bot", "prod")
        await aliases.set_alias(connection, tenant_id, "bot", "staging", 2)
        await aliases.delete_alias(connection, tenant_id, "bot", "staging")
        await aliases.set_alias(connection, tenant_id, "bot", "staging", 3)
        with pytest.raises(Conflict, match="never pointed"):
            await aliases.roll_back(connection, tenant_id, "bot", "staging")
        history = await aliases.alias_history(connection, tenant_id, "bot", "staging")
    assert [move.reason for move in history] == ["promote", "deleted", "promote"]


async def test_a_rollback_passes_over_deleted_versions(database: Database, tenant_id: str):
    """From 1, 2, 3 with 2 deleted to 1; and then, from 1 with 3 deleted, to nothing."""
    async with database.transaction() as connection:
        key = (connection, tenant_id, "bot", "prod")
        await aliases.set_alias(*key, 2)
        await aliases.set_alias(*key, 3)
        await connection.execute("DELETE FROM adapter_versions WHERE version = 2")
        await aliases.roll_back(*key)
        assert (await aliases.find_alias(*key)).version == 1
        await connection.execute("DELETE FROM adapter_versions WHERE version = 3")
        with pytest.raises(Conflict, match="anything else that is still there"):
            await aliases.roll_back(*key)


async def test_prod_stays_as_long_as_the_adapter(database: Database, tenant_id: str):
    async with database.transaction() as connection:
        with pytest.raises(Conflict, match="plain name"):
            await aliases.delete_alias(connection, tenant_id, "bot", "prod")
        with pytest.raises(NotFound):
            await aliases.delete_alias(connection, tenant_id, "bot", "staging")


async def test_moves_that_race_are_one_after_the_other(database: Database, tenant_id: str):
    async def move(number: int) -> None:
        async with database.transaction() as connection:
            key = (connection, tenant_id, "bot", "prod")
            if number % 3 == 2:
                await aliases.roll_back(*key)
            else:
                await aliases.set_alias(*key, 1 + number % 3)

    await asyncio.gather(*map(move, range(30)), return_exceptions=True)
    async with database.acquire() as connection:
        history = await aliases.alias_history(connection, tenant_id, "bot", "prod")
        current = await aliases.find_alias(connection, tenant_id, "bot", "prod")
    assert current.version == history[0].version
    for newer, older in itertools.pairwise(history):
        assert newer.previous == older.version


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("promote"), st.integers(1, 4)),
        st.tuples(
            st.just("canary"),
            st.dictionaries(st.integers(1, 4), st.integers(1, 100), min_size=1, max_size=3),
        ),
        st.tuples(st.just("rollback"), st.none()),
    ),
    max_size=12,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
async def test_an_alias_is_where_its_last_move_put_it(
    database: Database, tenant_id: str, operations: list[tuple[str, Any]]
):
    """Against a model of two lines: a stack of one, the present and the one before."""
    present: tuple[int, dict[int, int] | None] = (1, None)
    before = None
    async with database.acquire() as connection:
        transaction: Any = connection.transaction()
        await transaction.start()
        key = (connection, tenant_id, "bot", "prod")
        for kind, argument in operations:
            match kind:
                case "promote":
                    wanted = (argument, None)
                case "canary":
                    wanted = (present[0], argument)
                case _:
                    wanted = before
            is_legal = wanted is not None and {wanted[0], *(wanted[1] or ())} <= {1, 2, 3}
            if kind == "canary":
                is_legal = is_legal and len(argument) > 1 and present[0] in argument
            try:
                if kind == "promote":
                    await aliases.set_alias(*key, argument)
                elif kind == "canary":
                    await aliases.set_canary(*key, argument, None)
                else:
                    await aliases.roll_back(*key)
            except ApiError:
                assert not is_legal
            else:
                assert is_legal
                assert wanted is not None
                if wanted != present:
                    before, present = present, wanted
            found = await aliases.find_alias(*key)
            assert (found.version, found.canary) == present
        await transaction.rollback()


async def test_pins_are_within_the_quota_whatever_moves(database: Database, tenant_id: str):
    size = MANIFEST.file_bytes
    async with database.transaction() as connection:
        key = (connection, tenant_id, "bot")
        with pytest.raises(Conflict, match=f"{size} bytes and this tenant may pin 0"):
            await aliases.pin_alias(*key, "prod", True)
    async with database.transaction() as connection:
        await connection.execute("UPDATE tenants SET pin_bytes = $1", size)
        key = (connection, tenant_id, "bot")
        await aliases.pin_alias(*key, "prod", True)
        await aliases.set_alias(*key, "prod", 2)
        assert (await aliases.find_alias(*key, "prod")).pinned
        await aliases.set_alias(*key, "same", 2)
        await aliases.pin_alias(*key, "same", True)
    for version in (3, 1):
        with pytest.raises(Conflict, match="unpin another"):
            async with database.transaction() as connection:
                await aliases.set_alias(connection, tenant_id, "bot", "same", version)
    with pytest.raises(Conflict, match="unpin another"):
        async with database.transaction() as connection:
            weights = {2: 1, 3: 1}
            await aliases.set_canary(connection, tenant_id, "bot", "prod", weights, None)
    async with database.transaction() as connection:
        key = (connection, tenant_id, "bot")
        await aliases.pin_alias(*key, "prod", False)
        await aliases.set_alias(*key, "prod", 3)
        found = {a.alias: (a.version, a.pinned) for a in await aliases.list_aliases(*key)}
    assert found == {"prod": (3, False), "same": (2, True)}


async def test_an_upload_does_not_move_a_pinned_alias_beyond_the_quota(
    database: Database, tenant_id: str
):
    async with database.transaction() as connection:
        await connection.execute("UPDATE tenants SET pin_bytes = $1", MANIFEST.file_bytes)
        await aliases.set_alias(connection, tenant_id, "bot", "staging", 1)
        for alias in ("prod", "staging"):
            await aliases.pin_alias(connection, tenant_id, "bot", alias, True)
    async with database.transaction() as connection:
        await add(connection, tenant_id, "d", alias="prod")
    await prove_all(database)
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
    assert {(a.alias, a.version) for a in snapshot.aliases} == {("prod", 1), ("staging", 1)}
    assert [v.version for v in snapshot.versions] == [1, 2, 3, 4]


async def test_aliases_over_rest(plane: Plane, base: str):
    acme = await plane.tenant("acme")
    async with plane.database.transaction() as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await make_ready(connection, tenant_id, "a", "b", "c")
    path = "adapters/bot/aliases/prod"
    split = await acme.put(path, json={"canary": {"1": 90, "2": 10}})
    assert split.json()["canary"] == {"1": 90, "2": 10}
    assert split.json()["policy"] == {}
    assert split.json()["history"][0]["reason"] == "canary"
    unwatched = await acme.put(path, json={"canary": {"1": 90, "2": 10}, "policy": None})
    assert unwatched.json()["policy"] is None
    strict = {"window_s": 30, "min_requests": 5, "max_error_rate": 0.01, "max_ttft_ratio": 1.5}
    watched = await acme.put(path, json={"canary": {"1": 1, "2": 1, "3": 2}, "policy": strict})
    assert watched.json()["policy"] == strict
    shown = (await acme.get("adapters/bot")).json()
    assert [version["aliases"] for version in shown["versions"]] == [["prod"]] * 3
    etag = watched.headers["etag"]
    moved = await acme.put(path, json={"version": 2}, headers={"if-match": etag})
    assert (moved.json()["version"], moved.json()["canary"]) == (2, None)
    back = await acme.post(f"{path}/rollback")
    assert (back.status_code, back.json()["canary"]) == (200, {"1": 1, "2": 1, "3": 2})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"version": 1, "canary": {"1": 1, "2": 1}},
        {"version": 1, "policy": {}},
        {"version": 0},
        {"canary": {"1": 0, "2": 1}},
        {"canary": {"x": 1, "2": 1}},
        {"canary": {"1": 1, "2": 1}, "policy": {"window_s": 1}},
        {"canary": {"1": 1, "2": 1}, "policy": {"max_errors": 1}},
        {"version": 1, "stable": 1},
    ],
)
async def test_a_body_that_cannot_be_meant_is_refused(
    plane: Plane, base: str, body: dict[str, object]
):
    acme = await plane.tenant("acme")
    async with plane.database.transaction() as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await make_ready(connection, tenant_id, "a", "b")
    problem(await acme.put("adapters/bot/aliases/prod", json=body), 400)
    assert (await acme.get("adapters/bot/aliases/prod")).json()["version"] == 1
