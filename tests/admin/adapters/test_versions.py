"""From upload to ready: who proves what, and what a proof, a refusal or silence leads to."""

import asyncio

import pytest

from admin.adapters import aliases, versions
from admin.adapters.schemas import ProvingView, ServingView
from admin.tenants.tenants import create_tenant
from store.database import Database
from store.errors import Invalid, NotFound
from store.queries import catalog_generation, load_catalog, sql
from store.records import AdapterState, ServingData
from tests.adapters.files import BASE
from tests.admin.lifecycle import (
    FINGERPRINT,
    LAYOUT,
    add,
    claim,
    make_ready,
    make_tenant,
    prove,
    prove_all,
    report,
)

REFUSAL = {"code": "adapter.proof.mismatch", "field": "q_proj", "got": 1, "allowed": 0, "hint": ""}


async def state_of(database: Database, tenant_id: str, version: int, name: str = "bot") -> str:
    async with database.acquire() as connection:
        return (await versions.find_version(connection, tenant_id, name, version)).state


async def test_an_upload_is_not_served_before_it_is_proved(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        assert await add(connection, tenant_id, "a") == 1
        made = await versions.find_version(connection, tenant_id, "bot", 1)
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
    assert made.state == AdapterState.PROVING
    assert made.proving == ProvingView("waiting for a worker that serves tiny", 0)
    assert (snapshot.versions, snapshot.aliases) == ((), ())

    assert await prove_all(database) == 1
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
        proofs = (await versions.find_version(connection, tenant_id, "bot", 1)).proofs
    assert [(v.name, v.version) for v in snapshot.versions] == [("bot", 1)]
    assert [(a.alias, a.version) for a in snapshot.aliases] == [("prod", 1)]
    assert [(p.digest, p.layout, p.checksum) for p in snapshot.proofs] == [
        ("a" * 64, LAYOUT, "e" * 64)
    ]
    assert [(p.fingerprint, p.worker) for p in proofs] == [(FINGERPRINT, "worker-1")]
    assert await prove_all(database) == 0


async def test_a_version_is_served_when_every_live_gateway_knows_it(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a")
        before = await catalog_generation(connection)
    async with database.acquire() as connection:
        await report(connection, "gw-1", before, {})
        await report(connection, "gw-2", before, {})
        await report(connection, "dead", 1, {}, seconds_ago=11)

    async def is_served(version: int) -> bool:
        async with database.acquire() as connection:
            return (await versions.find_version(connection, tenant_id, "bot", version)).served

    assert await is_served(1)
    async with database.transaction() as connection:
        await add(connection, tenant_id, "b")
    assert not await is_served(2)
    await prove_all(database)
    assert not await is_served(2)
    async with database.acquire() as connection:
        ready = await catalog_generation(connection)
        await report(connection, "gw-1", ready, {})
        assert not await is_served(2)
        await report(connection, "gw-2", ready, {})
    assert await is_served(2)
    assert await is_served(1)


async def test_a_proof_is_of_one_version_alone(database: Database):
    """Another tenant with the same bytes sees nothing of it, nor does the same tenant's next."""
    async with database.transaction() as connection:
        acme = await make_tenant(connection)
        globex = await make_tenant(connection, "globex")
        await make_ready(connection, acme, "a")
        await add(connection, globex, "a", name="other")
        await add(connection, acme, "a", serving=ServingData(stop=("\n",)))
    assert await state_of(database, globex, 1, "other") == "proving"
    assert await state_of(database, acme, 2) == "proving"
    async with database.transaction() as connection:
        assert (await versions.find_version(connection, globex, "other", 1)).proofs == []
        found = {(c.tenant_id, c.name, c.version): c for c in await claim(connection)}
        assert found.keys() == {(globex, "other", 1), (acme, "bot", 2)}
        own = (LAYOUT, "e" * 64, FINGERPRINT, "worker-2")
        assert await connection.fetchval(sql["proving_ready"], globex, "other", 1, *own)
        (proof,) = (await versions.find_version(connection, globex, "other", 1)).proofs
        assert proof.worker == "worker-2"
    assert await state_of(database, globex, 1, "other") == "ready"
    assert await state_of(database, acme, 2) == "proving"


async def test_refused_uploads_are_few_and_none_is_a_version(database: Database, owner: Database):
    async with database.transaction() as connection:
        acme = await make_tenant(connection)
        globex = await make_tenant(connection, "globex")
        before = await catalog_generation(connection)
        await versions.add_rejected(connection, globex, "bot", REFUSAL)
        for number in range(3 * versions.MAX_REJECTED):
            await versions.add_rejected(connection, acme, f"bot{number}", REFUSAL)
        kept = await versions.list_rejected(connection, acme)
        newest = range(3 * versions.MAX_REJECTED - 1, 2 * versions.MAX_REJECTED - 1, -1)
        assert [each.name for each in kept] == [f"bot{number}" for number in newest]
        assert len(await versions.list_rejected(connection, globex)) == 1
        assert await connection.fetchval("SELECT count(*) FROM adapters") == 0
        assert await catalog_generation(connection) == before
        assert await add(connection, acme, "a") == 1
    async with owner.acquire() as connection:
        await connection.execute(
            "UPDATE rejected_uploads SET rejected_at = now() - '8 days'::interval"
        )
    async with database.transaction() as connection:
        await versions.prune_rejected(connection)
        assert await versions.list_rejected(connection, acme) == []


async def test_versions_proved_wrong_are_few_and_not_kept_for_long(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        for _ in range(versions.MAX_REJECTED + 2):
            number = await add(connection, tenant_id, "a")
            await connection.fetchval(sql["proving_rejected"], tenant_id, "bot", number, REFUSAL)
    async with database.transaction() as connection:
        await versions.prune_rejected(connection)
        found = await versions.list_versions(connection, tenant_id, "bot")
        assert len(found) == versions.MAX_REJECTED
        assert found[-1].version == versions.MAX_REJECTED + 2


async def test_content_and_serving_data_make_the_version(database: Database):
    polite = ServingData(stop=("bye",), metadata={"run": "7"})
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        assert await add(connection, tenant_id, "a") == 1
        assert await add(connection, tenant_id, "a") == 1
        assert await add(connection, tenant_id, "a", serving=polite) == 2
        assert await add(connection, tenant_id, "b") == 3
    await prove_all(database)
    async with database.transaction() as connection:
        assert await add(connection, tenant_id, "a") == 1
        assert await add(connection, tenant_id, "a", serving=polite) == 2
        serving = (await versions.find_version(connection, tenant_id, "bot", 2)).serving
        assert serving == ServingView(**polite.shared(), template=None)


async def test_two_gateways_never_claim_the_same_version(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        for digit in "abcdef":
            await add(connection, tenant_id, digit)
        for gateway in ("gw-1", "gw-2"):
            await report(connection, gateway, 1, {})
    async with database.transaction() as one, database.transaction() as other:
        mine = await claim(one, "gw-1", 4)
        theirs = await claim(other, "gw-2", 4)
    assert [found.version for found in mine] == [1, 2, 3, 4]
    assert [found.version for found in theirs] == [5, 6]
    async with database.acquire() as connection:
        assert await claim(connection, "gw-3") == []
        await connection.execute("UPDATE version_proving SET claimed_until = now()")
        again = await claim(connection, "gw-3")
        assert [(found.version, found.attempts) for found in again] == [(n, 2) for n in range(1, 7)]


async def test_no_tenant_waits_behind_all_versions_of_another(database: Database):
    """What a tenant has in progress counts as its share."""
    async with database.transaction() as connection:
        many = await make_tenant(connection)
        for digit in "abcdef":
            await add(connection, many, digit)
        assert len(await claim(connection, limit=2)) == 2
        few = (await create_tenant(connection, "globex")).id
        for digit in "ab":
            await add(connection, few, digit)
        order = [(await claim(connection, limit=1))[0].tenant_id for _ in range(6)]
    assert order == [few, few, many, many, many, many]


async def test_the_claims_of_a_dead_gateway_are_free(database: Database):
    async with database.transaction() as connection:
        await add(connection, await make_tenant(connection), "a")
        await report(connection, "gw-1", 1, {})
        assert len(await claim(connection, "gw-1")) == 1
        assert await claim(connection, "gw-2") == []
        await report(connection, "gw-1", 1, {}, seconds_ago=6)
        assert await claim(connection, "gw-1") == []
        assert len(await claim(connection, "gw-2")) == 1


async def test_a_claim_is_for_base_models_that_are_served(database: Database):
    async with database.transaction() as connection:
        await add(connection, await make_tenant(connection), "a")
        rows = await connection.fetch(sql["proving_claim"], "gw-1", ["d" * 64], 10)
    assert list(rows) == []


async def test_a_released_claim_says_why_and_comes_back(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
        await claim(connection)
        release = (tenant_id, "bot", 1, "gw-1", "the worker went away")
        await connection.execute(sql["proving_release"], *release)
        made = await versions.find_version(connection, tenant_id, "bot", 1)
        assert made.proving == ProvingView("the worker went away", 1)
        assert await claim(connection) == []
        await connection.execute("UPDATE version_proving SET claimed_until = now()")
    async with database.transaction() as connection:
        assert len(await claim(connection)) == 1
        stale = (tenant_id, "bot", 1, "gw-2", "not mine")
        await connection.execute(sql["proving_release"], *stale)
        made = await versions.find_version(connection, tenant_id, "bot", 1)
        assert made.proving == ProvingView("the worker went away", 2)


async def test_a_version_proved_wrong_is_rejected_and_its_content_let_go(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
        await claim(connection)
        assert await connection.fetchval(sql["proving_rejected"], tenant_id, "bot", 1, REFUSAL)
        assert not await connection.fetchval(sql["proving_rejected"], tenant_id, "bot", 1, REFUSAL)
        rejected = await versions.find_version(connection, tenant_id, "bot", 1)
        assert (rejected.state, rejected.error) == (AdapterState.REJECTED, REFUSAL)
        assert [row["digest"] for row in await connection.fetch(sql["contents_due"])] == ["a" * 64]
        with pytest.raises(NotFound):
            await aliases.find_alias(connection, tenant_id, "bot", "prod")
        assert await add(connection, tenant_id, "a") == 2


async def test_a_proof_that_comes_too_late_changes_nothing(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
        found = (await claim(connection))[0]
        await connection.execute(sql["version_retire"], tenant_id, "bot", [1])
        assert not await prove(connection, found)
        assert (await versions.find_version(connection, tenant_id, "bot", 1)).proofs == []
    assert await state_of(database, tenant_id, 1) == "retired"


async def test_proofs_are_wanted_for_every_layout(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
        await add(connection, tenant_id, "c")

        async def missing(layout: str, *without: str) -> list[str]:
            query = (layout, BASE.digest, list(without), 10)
            rows = await connection.fetch(sql["proofs_missing"], *query)
            return [row["digest"][0] for row in rows]

        assert await missing(LAYOUT) == []
        assert await missing("cuda/bfloat16/1") == ["a", "b"]
        assert await missing("cuda/bfloat16/1", f"{tenant_id}/bot/1") == ["b"]
        proof = (BASE.digest, "cuda/bfloat16/1", "f" * 64, FINGERPRINT, "gpu-1")
        await connection.execute(sql["proof_insert"], tenant_id, "bot", 2, *proof)
        assert await missing("cuda/bfloat16/1") == ["a"]


async def test_the_alias_of_an_upload_moves_when_it_is_ready(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
        await add(connection, tenant_id, "b", alias="staging")
        with pytest.raises(NotFound):
            await aliases.find_alias(connection, tenant_id, "bot", "staging")
    await prove_all(database)
    async with database.acquire() as connection:
        found = await aliases.list_aliases(connection, tenant_id, "bot")
        history = await aliases.alias_history(connection, tenant_id, "bot", "staging")
        made = await versions.find_version(connection, tenant_id, "bot", 2)
    assert [(alias.alias, alias.version) for alias in found] == [("prod", 1), ("staging", 2)]
    assert [(move.reason, move.changed_by) for move in history] == [("upload", "uploader")]
    assert made.wanted_alias is None


async def test_a_version_that_equals_its_base_becomes_prod_on_request_alone(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a", equals_base=True)
        await add(connection, tenant_id, "b", equals_base=True, alias="staging")
    await prove_all(database)
    async with database.transaction() as connection:
        found = await aliases.list_aliases(connection, tenant_id, "bot")
        assert [(alias.alias, alias.version) for alias in found] == [("staging", 2)]
        await add(connection, tenant_id, "c")
    await prove_all(database)
    async with database.transaction() as connection:
        assert (await aliases.find_alias(connection, tenant_id, "bot", "prod")).version == 3
        await aliases.set_alias(connection, tenant_id, "bot", "prod", 1, "operator")
        assert (await aliases.find_alias(connection, tenant_id, "bot", "prod")).version == 1


async def test_an_upload_that_is_ready_late_does_not_undo_what_came_after(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
    for digit in "cd":
        async with database.transaction() as connection:
            await add(connection, tenant_id, digit, alias="staging")
    async with database.transaction() as connection:
        third, fourth = await claim(connection)
    for found in (fourth, third):
        async with database.transaction() as connection:
            await prove(connection, found)
    async with database.acquire() as connection:
        alias = await aliases.find_alias(connection, tenant_id, "bot", "staging")
        late = await versions.find_version(connection, tenant_id, "bot", 3)
    assert (alias.version, late.state, late.wanted_alias) == (4, AdapterState.READY, "staging")

    async with database.transaction() as connection:
        await add(connection, tenant_id, "e", alias="prod")
    async with database.transaction() as connection:
        await aliases.set_alias(connection, tenant_id, "bot", "prod", 2, "operator")
    await prove_all(database)
    async with database.acquire() as connection:
        assert (await aliases.find_alias(connection, tenant_id, "bot", "prod")).version == 2


async def test_a_rejected_version_never_becomes_anything_else(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
        assert await connection.fetchval(sql["proving_rejected"], tenant_id, "bot", 1, REFUSAL)
    with pytest.raises(Invalid, match="immutable"):
        async with database.transaction() as connection:
            await connection.execute("UPDATE adapter_versions SET state = 'ready'")


@pytest.mark.parametrize(
    "change",
    [
        "digest = repeat('d', 64)",
        'serving = \'{"stop": ["x"]}\'',
        "version = 9",
        "state = 'proving'",
        "manifest = '{}'",
    ],
)
async def test_a_ready_version_never_changes(database: Database, change: str):
    async with database.transaction() as connection:
        await make_ready(connection, await make_tenant(connection), "a")
    with pytest.raises(Invalid, match="immutable"):
        async with database.transaction() as connection:
            await connection.execute(f"UPDATE adapter_versions SET {change}")


async def test_concurrent_uploads_get_different_numbers(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)

    async def upload(digit: str) -> int:
        async with database.transaction() as connection:
            return await add(connection, tenant_id, digit, name="new")

    assert sorted(await asyncio.gather(*map(upload, "123456"))) == [1, 2, 3, 4, 5, 6]


async def test_claims_and_releases_do_not_wake_the_gateways(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
        before = await catalog_generation(connection)
        await claim(connection)
        await connection.execute(sql["proving_release"], tenant_id, "bot", 1, "gw-1", "later")
        assert await catalog_generation(connection) == before
