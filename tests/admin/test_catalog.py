"""Records in and out of real tables, and how the gateway hears of a change."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from adapters.manifest import AdapterManifest
from admin import adapters, models, tenants
from admin.database import Connection, Database
from admin.errors import AlreadyExists, Conflict, DatabaseUnavailable, Invalid, NotFound
from admin.queries import CATALOG_CHANNEL, catalog_generation, load_catalog, load_queries, sql
from admin.records import TENANT_SCOPES, AdapterState, hash_key
from tests.adapters.files import BASE

MANIFEST = AdapterManifest(
    digest="a" * 64,
    base_digest=BASE.digest,
    max_rank=4,
    num_parameters=100,
    file_bytes=400,
    projections=("q_proj",),
    layers=(0, 1),
)
OTHER = msgspec.structs.replace(MANIFEST, digest="c" * 64)


async def fill(connection: Connection) -> str:
    """A tenant with one ready version of `bot`; its id."""
    tenant = await tenants.create_tenant(connection, "acme")
    await models.register_model(connection, "tiny", BASE, 512)
    await adapters.add_version(connection, tenant.id, "bot", "tiny", MANIFEST)
    return tenant.id


async def test_the_snapshot_holds_what_was_written(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)
        key, text = await tenants.create_key(connection, b"p", tenant_id, TENANT_SCOPES, "ci")
        gone, _ = await tenants.create_key(connection, b"p", tenant_id, TENANT_SCOPES)
        await tenants.revoke_key(connection, gone.id)
        await adapters.add_rejected(connection, tenant_id, "bot", {"code": "x"})
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
        assert snapshot.generation == await catalog_generation(connection)
    assert [tenant.name for tenant in snapshot.tenants] == ["acme"]
    assert snapshot.keys == (key,)
    assert key.hash == hash_key(text, b"p")
    assert snapshot.models[0].shape == BASE
    assert [(v.name, v.version, v.state) for v in snapshot.versions] == [
        ("bot", 1, AdapterState.READY)
    ]
    assert [(a.alias, a.version) for a in snapshot.aliases] == [("prod", 1)]


async def test_each_change_raises_the_generation_and_is_heard(dsn: str, database: Database):
    heard: asyncio.Queue[str] = asyncio.Queue()
    await database.listen(CATALOG_CHANNEL, heard.put_nowait)
    assert await heard.get() == ""
    async with database.acquire() as connection:
        before = await catalog_generation(connection)
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    generation = int(await asyncio.wait_for(heard.get(), 5))
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
    generation = int(await asyncio.wait_for(heard.get(), 5))
    async with database.acquire() as connection:
        assert generation == await catalog_generation(connection)
    assert heard.empty()


async def test_a_listener_comes_back_after_its_connection_was_cut(database: Database):
    heard: asyncio.Queue[str] = asyncio.Queue()
    await database.listen(CATALOG_CHANNEL, heard.put_nowait)
    await heard.get()
    async with database.acquire() as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'loraplex-listen'"
        )
    assert await asyncio.wait_for(heard.get(), 10) == ""
    async with database.transaction() as connection:
        await tenants.create_tenant(connection, "acme")
    assert int(await asyncio.wait_for(heard.get(), 5))


async def test_names_of_adapters_and_base_models_stay_apart(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)
    with pytest.raises(AlreadyExists, match="a base model is named tiny"):
        async with database.transaction() as connection:
            await adapters.add_version(connection, tenant_id, "tiny", "tiny", MANIFEST)
    with pytest.raises(AlreadyExists, match="an adapter is named bot"):
        async with database.transaction() as connection:
            await models.register_model(connection, "bot", BASE, 512)


async def test_of_a_model_and_an_adapter_that_race_for_a_name_one_wins(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)

    async def make_adapter(name: str) -> None:
        async with database.transaction() as connection:
            await adapters.add_version(connection, tenant_id, name, "tiny", MANIFEST)

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


async def test_version_numbers_are_not_used_twice(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)
        second, is_new = await adapters.add_version(connection, tenant_id, "bot", "tiny", OTHER)
        assert (second.version, is_new) == (2, True)
        again, is_new = await adapters.add_version(connection, tenant_id, "bot", "tiny", OTHER)
        assert (again, is_new) == (second, False)
        await adapters.delete_version(connection, tenant_id, "bot", 2)
        third, _ = await adapters.add_version(connection, tenant_id, "bot", "tiny", OTHER)
        assert third.version == 3


async def test_concurrent_uploads_get_different_numbers(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)

    async def add(digit: str) -> int:
        manifest = msgspec.structs.replace(MANIFEST, digest=digit * 64)
        async with database.transaction() as connection:
            version, _ = await adapters.add_version(connection, tenant_id, "new", "tiny", manifest)
        return version.version

    assert sorted(await asyncio.gather(*map(add, "123456"))) == [1, 2, 3, 4, 5, 6]


async def test_only_promote_moves_prod_and_its_moves_are_kept(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)
        await adapters.add_version(connection, tenant_id, "bot", "tiny", OTHER)
        alias = await adapters.find_alias(connection, tenant_id, "bot", "prod")
        assert alias is not None and alias.version == 1
        await adapters.set_alias(connection, tenant_id, "bot", "prod", 2, "somekey")
        await adapters.set_alias(connection, tenant_id, "bot", "prod", 2, "somekey")
        history = await adapters.alias_history(connection, tenant_id, "bot", "prod")
    assert [(m.version, m.previous, m.changed_by) for m in history] == [
        (2, 1, "somekey"),
        (1, None, None),
    ]


async def test_an_alias_points_to_ready_versions_alone(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)
        await adapters.add_rejected(connection, tenant_id, "bot", {"code": "x"})
        with pytest.raises(Conflict, match="rejected"):
            await adapters.set_alias(connection, tenant_id, "bot", "prod", 2)
        with pytest.raises(NotFound):
            await adapters.set_alias(connection, tenant_id, "bot", "prod", 9)
        with pytest.raises(Conflict, match="'prod' points to"):
            await adapters.delete_version(connection, tenant_id, "bot", 1)
    with pytest.raises(Invalid):
        async with database.transaction() as connection:
            await adapters.set_alias(connection, tenant_id, "bot", "7", 1)


async def test_a_finished_version_never_changes(database: Database):
    async with database.transaction() as connection:
        await fill(connection)
    with pytest.raises(Invalid, match="immutable"):
        async with database.transaction() as connection:
            await connection.execute("UPDATE adapter_versions SET digest = repeat('d', 64)")


async def test_deleting_a_tenant_takes_all_of_it(database: Database):
    async with database.transaction() as connection:
        tenant_id = await fill(connection)
        await tenants.create_key(connection, b"p", tenant_id, TENANT_SCOPES)
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
            await adapters.find_version(connection, "t", "n", 1 << 40)


def test_a_query_name_is_used_once(tmp_path: Path):
    (tmp_path / "a.sql").write_text("-- name: one\nSELECT 1;\n")
    assert load_queries(tmp_path) == {"one": "SELECT 1;"}
    (tmp_path / "b.sql").write_text("-- name: one\nSELECT 2;\n")
    with pytest.raises(ValueError, match="twice"):
        load_queries(tmp_path)


async def test_every_query_fits_the_schema(database: Database):
    async with database.transaction() as connection:
        for name, text in sql.items():
            await connection.execute(f"PREPARE {name} AS {text}")
