"""Records in and out of real tables, and how the gateway hears of a change."""

import asyncio
from pathlib import Path

import pytest

from admin.adapters import versions
from admin.keys import keys
from admin.models import models
from admin.tenants import tenants
from store.database import EVERYTHING, Database
from store.errors import AlreadyExists, DatabaseUnavailable, Invalid
from store.queries import CATALOG_CHANNEL, catalog_generation, load_catalog, load_queries, sql
from store.records import TENANT_SCOPES, GenerationDefaults, ServingData, hash_key
from tests.adapters.files import BASE
from tests.admin.lifecycle import add, make_ready, make_tenant, prove_all
from tests.proxy import PostgresProxy, Way, everything


async def test_the_snapshot_holds_what_was_written(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a")
        key, text = await keys.create_key(connection, b"p", tenant_id, TENANT_SCOPES, "ci")
        gone, _ = await keys.create_key(connection, b"p", tenant_id, TENANT_SCOPES)
        await keys.revoke_key(connection, gone.id)
        await versions.add_rejected(connection, tenant_id, "refused", {"code": "x"})
        await add(connection, tenant_id, "b")
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
        assert snapshot.generation == await catalog_generation(connection)
    assert [tenant.name for tenant in snapshot.tenants] == ["acme"]
    assert snapshot.keys == (key,)
    assert key.hash == hash_key(text, b"p")
    assert snapshot.models[0].shape == BASE
    assert [(v.name, v.version, v.digest) for v in snapshot.versions] == [("bot", 1, "a" * 64)]
    assert [(a.alias, a.version) for a in snapshot.aliases] == [("prod", 1)]


class LaterDefaults(GenerationDefaults, frozen=True, omit_defaults=True):
    later: int = 0


class LaterServing(ServingData, frozen=True, omit_defaults=True):
    defaults: LaterDefaults = LaterDefaults()
    later: int = 0


async def test_serving_data_of_a_later_release_is_read_as_far_as_it_is_known(database: Database):
    """Gateways are upgraded one after the other."""
    serving = LaterServing(stop=("bye",), defaults=LaterDefaults(top_k=5, later=1), later=1)
    async with database.transaction() as connection:
        await add(connection, await make_tenant(connection), "a", serving=serving)
    await prove_all(database)
    async with database.acquire() as connection:
        (version,) = (await load_catalog(connection)).versions
    assert version.serving == ServingData(stop=("bye",), defaults=GenerationDefaults(top_k=5))


async def test_each_change_raises_the_generation_and_is_heard(dsn: str, database: Database):
    heard: asyncio.Queue[str] = asyncio.Queue()
    await database.listen(CATALOG_CHANNEL, heard.put_nowait)
    assert await heard.get() == ""
    async with database.acquire() as connection:
        before = await catalog_generation(connection)
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    generation = int(await asyncio.wait_for(heard.get(), 60))
    async with database.acquire() as connection:
        assert before < generation == await catalog_generation(connection)


async def test_nothing_is_heard_of_what_was_rolled_back(database: Database):
    heard: asyncio.Queue[str] = asyncio.Queue()
    await database.listen(CATALOG_CHANNEL, heard.put_nowait)
    await heard.get()
    with pytest.raises(RuntimeError):
        async with database.transaction() as connection:
            await tenants.create_tenant(connection, "never")
            raise RuntimeError
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    generation = int(await asyncio.wait_for(heard.get(), 60))
    async with database.acquire() as connection:
        assert generation == await catalog_generation(connection)
    assert heard.empty()


async def test_a_listener_comes_back_after_its_connection_was_cut(
    database: Database, owner: Database
):
    heard: asyncio.Queue[str] = asyncio.Queue()
    await database.listen(CATALOG_CHANNEL, heard.put_nowait)
    await heard.get()
    async with owner.acquire() as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'loraplex-listen'"
        )
    for _ in ("lost", "made again"):
        assert await asyncio.wait_for(heard.get(), 60) == ""
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    assert int(await asyncio.wait_for(heard.get(), 60))


async def test_a_listener_comes_back_after_its_connection_went_silent(
    database: Database, dsn: str, tmp_path: Path
):
    """As where something between forgets a connection that nothing came over for long."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with PostgresProxy(dsn, tmp_path) as proxy:
        far = await Database.connect(proxy.dsn, sees=EVERYTHING)
        try:
            await far.listen(CATALOG_CHANNEL, heard.put_nowait, check_interval_s=0.2)
            assert await heard.get() == ""
            await asyncio.sleep(0.5)
            assert heard.empty()
            proxy.set_both(Way(swallows=everything))
            assert await asyncio.wait_for(heard.get(), 60) == ""
            proxy.set_both(Way())
            assert await asyncio.wait_for(heard.get(), 60) == ""
            async with database.transaction() as connection:
                await tenants.create_tenant(connection, "acme")
            assert int(await asyncio.wait_for(heard.get(), 60))
        finally:
            await far.close()


async def test_names_of_adapters_and_base_models_stay_apart(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await add(connection, tenant_id, "a")
    with pytest.raises(AlreadyExists, match="a base model is named tiny"):
        async with database.transaction() as connection:
            await add(connection, tenant_id, "a", name="tiny")
    with pytest.raises(AlreadyExists, match="an adapter is named bot"):
        async with database.transaction() as connection:
            await models.register_model(connection, "bot", BASE, 512)


async def test_of_a_model_and_an_adapter_that_race_for_a_name_one_wins(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)

    async def make_adapter(name: str) -> None:
        async with database.transaction() as connection:
            await add(connection, tenant_id, "a", name=name)

    async def make_model(name: str) -> None:
        async with database.transaction() as connection:
            await models.register_model(connection, name, BASE, 512)

    for i in range(5):
        name = f"both{i}"
        ends = await asyncio.gather(make_adapter(name), make_model(name), return_exceptions=True)
        assert [type(end) for end in ends if end is not None] == [AlreadyExists]


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "-a", "a b", "é", "a\n", "x" * 129, "a\0"])
async def test_names_have_a_form(database: Database, name: str):
    with pytest.raises(Invalid):
        async with database.transaction() as connection:
            await tenants.create_tenant(connection, name)


async def test_deleting_a_tenant_takes_all_of_it(database: Database):
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
        await keys.create_key(connection, b"p", tenant_id, TENANT_SCOPES)
        tenant = await tenants.find_tenant(connection, tenant_id)
    async with database.transaction() as connection:
        await tenants.delete_tenant(connection, tenant)
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
    left = (snapshot.tenants, snapshot.keys, snapshot.versions, snapshot.aliases)
    assert left == ((), (), (), ())


async def test_a_database_that_is_away_is_called_so(dsn: str):
    with pytest.raises(DatabaseUnavailable):
        await Database.connect(dsn.replace("/test_", "/missing_"))
    with pytest.raises(DatabaseUnavailable):
        await Database.connect("postgresql://nobody@127.0.0.1:1/none")


async def test_a_value_out_of_range_is_the_callers_fault(database: Database):
    with pytest.raises(Invalid):
        async with database.acquire() as connection:
            await connection.execute(sql["version_delete"], "t", "n", 1 << 40)


def test_a_query_name_is_used_once(tmp_path: Path):
    (tmp_path / "a.sql").write_text("-- name: one\nSELECT 1;\n")
    assert load_queries(tmp_path) == {"one": "SELECT 1;"}
    (tmp_path / "b.sql").write_text("-- name: one\nSELECT 2;\n")
    with pytest.raises(ValueError, match="twice"):
        load_queries(tmp_path)


def test_columns_are_the_fields_of_a_struct(tmp_path: Path):
    """Apart from those that the statement names itself."""
    price = "{p.columns of store.records.Price}, 1 AS input"
    (tmp_path / "a.sql").write_text(f"-- name: one\nSELECT {price} FROM prices p;\n")
    queries = load_queries(tmp_path)
    for _ in range(2):
        one = "SELECT p.model, p.cached_input, p.output, 1 AS input FROM prices p;"
        assert queries["one"] == one


async def test_every_query_fits_the_schema(database: Database):
    async with database.transaction() as connection:
        for name in sql:
            await connection.execute(f"PREPARE {name} AS {sql[name]}")
