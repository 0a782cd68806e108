"""Retirement: what has it keeps it, nothing new gets it, and then nothing of it is left."""

import asyncio
import threading
from pathlib import Path

import httpx
import pytest

from adapters.store.folder import Kind, LocalStore, StoreUnavailable
from admin.adapters import contents, retirement
from admin.upkeep.reaper import Reaper
from store.database import Database
from store.errors import Conflict, NotFound
from store.queries import catalog_generation, load_catalog
from tests.adapters.files import BASE, write_adapter
from tests.admin.conftest import Plane, write_model
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import add, make_ready, make_tenant, prove_all, report
from tests.admin.serve import administration
from tests.admin.uploads.test_upload import parts
from tests.stored import kept


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
async def tenant_id(database: Database) -> str:
    """`bot` with the ready versions 1 and 2; `prod` is 1."""
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
    return tenant_id


async def versions_left(database: Database) -> list[tuple[str, int, str]]:
    async with database.acquire() as connection:
        rows = await connection.fetch("SELECT name, version, state FROM adapter_versions")
    return sorted(tuple(row.values()) for row in rows)


async def retire(database: Database, tenant_id: str, version: int) -> retirement.Retirement:
    async with database.transaction() as connection:
        return await retirement.retire_version(connection, tenant_id, "bot", version)


async def test_a_retired_version_is_not_in_the_catalog(database: Database, tenant_id: str):
    retired = await retire(database, tenant_id, 2)
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
    assert [v.version for v in snapshot.versions] == [1]
    assert snapshot.generation >= retired.generation
    assert retired.keys == [f"{tenant_id}/bot/2"]


async def test_what_an_alias_points_to_is_not_retired(database: Database, tenant_id: str):
    with pytest.raises(Conflict, match="'prod' points to version 1"):
        await retire(database, tenant_id, 1)
    async with database.transaction() as connection:
        weights = '{"1": 9, "2": 1}'
        await connection.execute(
            "SELECT point_alias($1, 'bot', 'prod', 1, ($2::text)::jsonb, NULL, NULL, 'canary',"
            " NULL, NULL)",
            *(tenant_id, weights),
        )
    with pytest.raises(Conflict, match="'prod' points to version 2"):
        await retire(database, tenant_id, 2)
    with pytest.raises(NotFound):
        await retire(database, tenant_id, 3)


async def test_a_version_stays_while_a_gateway_may_use_it(
    database: Database, store: LocalStore, tenant_id: str
):
    reaper = Reaper(database, store)
    (staged := store.stage()).joinpath("x").write_text("")
    store.put("adapters", "b" * 64, staged)
    async with database.acquire() as connection:
        before = await catalog_generation(connection)
        await report(connection, "gw-1", before, {})
        await report(connection, "gw-2", before, {})
    retired = await retire(database, tenant_id, 2)
    here, gone = [("bot", 1, "ready"), ("bot", 2, "retired")], [("bot", 1, "ready")]

    async with database.acquire() as connection:
        await reaper.reap()
        assert not (await retirement.retirement_progress(connection, retired)).is_known
        assert await versions_left(database) == here

        await report(connection, "gw-1", retired.generation, {f"{tenant_id}/bot/2": 2})
        await report(connection, "gw-2", retired.generation, {f"{tenant_id}/bot/20": 7})
        progress = await retirement.retirement_progress(connection, retired)
        assert (progress.is_known, progress.in_flight) == (True, 2)
        await reaper.reap()
        assert await versions_left(database) == here
        assert store.exists("adapters", "b" * 64)

        await report(connection, "gw-1", retired.generation, {})
        await reaper.reap()
        assert await versions_left(database) == gone
        assert not store.exists("adapters", "b" * 64)
        assert (
            await connection.fetch("SELECT FROM adapter_proofs WHERE digest = $1", "b" * 64) == []
        )


async def test_a_dead_gateway_holds_nothing_back(
    database: Database, store: LocalStore, tenant_id: str
):
    retired = await retire(database, tenant_id, 2)
    async with database.acquire() as connection:
        held = {f"{tenant_id}/bot/2": 1}
        await report(connection, "gw-1", retired.generation, held, seconds_ago=14)
        await Reaper(database, store).reap()
        assert len(await versions_left(database)) == 2
        # Perhaps it lives, but nobody waits for its word.
        assert (await retirement.retirement_progress(connection, retired)).is_known
        await report(connection, "gw-1", retired.generation, held, seconds_ago=16)
    await Reaper(database, store).reap()
    assert await versions_left(database) == [("bot", 1, "ready")]


async def test_a_deleted_adapter_is_gone_for_all_but_its_requests(
    database: Database, store: LocalStore, tenant_id: str
):
    async with database.transaction() as connection:
        retired = await retirement.retire_adapter(connection, tenant_id, "bot")
        await report(connection, "gw-1", retired.generation, {f"{tenant_id}/bot/1": 1})
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
        assert (snapshot.versions, snapshot.aliases) == ((), ())
        with pytest.raises(NotFound):
            async with database.transaction() as inner:
                await retirement.retire_adapter(inner, tenant_id, "bot")
        await Reaper(database, store).reap()
        assert await versions_left(database) == [("bot", 1, "retired")]
        # A new life under the old name has nothing of the old one.
        await make_ready(connection, tenant_id, "a")
        await report(connection, "gw-1", retired.generation, {})
        await Reaper(database, store).reap()
        history = await connection.fetch("SELECT version, reason FROM alias_history")
    assert await versions_left(database) == [("bot", 3, "ready")]
    assert [(row["version"], row["reason"]) for row in history] == [(3, "first")]


async def test_a_content_stays_while_anybody_names_or_holds_it(
    database: Database, store: LocalStore, tenant_id: str
):
    reaper = Reaper(database, store)

    def put(digit: str) -> None:
        (staged := store.stage()).joinpath("x").write_text("")
        store.put("adapters", digit * 64, staged)

    put("a")
    put("c")
    async with database.transaction() as connection:
        await contents.leave(connection, "a" * 64)
        await contents.leave(connection, "c" * 64)
    async with contents.held(database, "c" * 64):
        await reaper.reap()
        assert kept(store, "adapters") == ["a" * 64, "c" * 64]
        async with database.transaction() as connection:
            await contents.leave(connection, "c" * 64)
    await reaper.reap()
    assert kept(store, "adapters") == ["a" * 64]


class SlowStore(LocalStore):
    """Answers when it is let."""

    def __init__(self, root: Path, *slow: str) -> None:
        super().__init__(root)
        self.is_asked, self.go_on = threading.Event(), threading.Event()
        self._slow = slow

    def _wait(self, what: str) -> None:
        if what in self._slow:
            self.is_asked.set()
            assert self.go_on.wait(30)

    def put(self, kind: Kind, digest: str, staged: Path, *, durable: bool = True) -> None:
        super().put(kind, digest, staged)
        self._wait("put")

    def exists(self, kind: Kind, digest: str) -> bool:
        self._wait("exists")
        return super().exists(kind, digest)

    def delete(self, kind: Kind, digest: str) -> None:
        self._wait("delete")
        super().delete(kind, digest)


async def test_nobody_waits_for_a_store_that_removes_slowly(
    database: Database, tmp_path: Path, tenant_id: str
):
    """But who brings that content again, and it is there afterwards."""
    store = SlowStore(tmp_path / "store", "delete")

    def put() -> None:
        (staged := store.stage()).joinpath("x").write_text("")
        store.put("adapters", "c" * 64, staged)

    async def put_again() -> None:
        async with contents.held(database, "c" * 64):
            assert kept(store, "adapters") == []
            put()
            async with database.transaction() as connection:
                await add(connection, tenant_id, "c")

    put()
    async with database.transaction() as connection:
        await contents.leave(connection, "c" * 64)
    removing = asyncio.create_task(Reaper(database, store).reap())
    await asyncio.to_thread(store.is_asked.wait, 30)
    async with asyncio.timeout(3):
        await retire(database, tenant_id, 2)
        # Nor does another reaper begin with what is being removed.
        await Reaper(database, LocalStore(tmp_path / "store")).reap()
    putting = asyncio.create_task(put_again())
    await asyncio.sleep(0.3)
    assert not putting.done() and kept(store, "adapters") == ["c" * 64]
    store.go_on.set()
    await asyncio.gather(removing, putting)
    await Reaper(database, store).reap()
    assert kept(store, "adapters") == ["c" * 64]
    async with database.acquire() as connection:
        assert await connection.fetch("SELECT FROM loose_contents") == []


async def test_what_a_store_would_not_remove_is_due_at_once(database: Database, tmp_path: Path):
    store = LocalStore(tmp_path / "store")
    (staged := store.stage()).joinpath("x").write_text("")
    store.put("adapters", "c" * 64, staged)
    async with database.transaction() as connection:
        await contents.leave(connection, "c" * 64)

    async def fail(_: str) -> None:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        await contents.remove_due(database, fail)
    async with asyncio.timeout(3), contents.held(database, "c" * 64):
        pass
    await Reaper(database, store).reap()
    assert kept(store, "adapters") == []


async def upload(dsn: str, database: Database, store: LocalStore, folder: Path) -> httpx.Response:
    write_model(folder / "store", BASE.digest)
    write_adapter(folder / "adapter")
    own = await Database.connect(dsn)
    async with administration(own, store, has_upkeep=False) as client:
        answer = await client.post(
            "adapters", data={"name": "new", "tenant": "acme"}, files=parts(folder / "adapter")
        )
    await own.close()
    return answer


async def test_an_upload_keeps_nobody_waiting_for_the_store(
    dsn: str, database: Database, tenant_id: str, tmp_path: Path
):
    store = SlowStore(tmp_path / "store", "exists")
    uploading = asyncio.create_task(upload(dsn, database, store, tmp_path))
    await asyncio.wait([uploading], timeout=3)
    async with asyncio.timeout(3):
        await retire(database, tenant_id, 2)
    store.go_on.set()
    assert (await uploading).status_code == 201


async def test_an_upload_whose_hold_ran_out_makes_no_version(
    dsn: str, database: Database, tenant_id: str, tmp_path: Path
):
    """It was stopped for so long that its content has been removed meanwhile."""
    store = SlowStore(tmp_path / "store", "put")
    uploading = asyncio.create_task(upload(dsn, database, store, tmp_path))
    await asyncio.to_thread(store.is_asked.wait, 30)
    async with database.acquire() as connection:
        await connection.execute("UPDATE loose_contents SET due = now()")
    await Reaper(database, store).reap()
    assert kept(store, "adapters") == []
    store.go_on.set()
    answer = await uploading
    problem(answer, 409)
    assert answer.headers["x-should-retry"] == "true"
    assert {name for name, _, _ in await versions_left(database)} == {"bot"}


async def test_an_uploader_that_died_leaves_nothing(database: Database, store: LocalStore):
    (staged := store.stage()).joinpath("x").write_text("")
    store.put("adapters", "c" * 64, staged)
    async with database.acquire() as connection:
        await connection.execute(
            "INSERT INTO loose_contents VALUES ($1, 'dead', now() + interval '0.3 seconds')",
            "c" * 64,
        )
    await Reaper(database, store).reap()
    assert kept(store, "adapters") == ["c" * 64]
    await asyncio.sleep(0.4)
    await Reaper(database, store).reap()
    assert kept(store, "adapters") == []
    async with database.acquire() as connection:
        assert await connection.fetch("SELECT FROM loose_contents") == []


async def test_nothing_to_remove_changes_nothing(
    database: Database, store: LocalStore, tenant_id: str
):
    async with database.acquire() as connection:
        before = await catalog_generation(connection)
        for _ in range(3):
            await Reaper(database, store).reap()
        assert await catalog_generation(connection) == before


async def test_reapers_do_not_mind_each_other(
    database: Database, store: LocalStore, tenant_id: str
):
    async with database.transaction() as connection:
        await retirement.retire_adapter(connection, tenant_id, "bot")
    await asyncio.gather(*(Reaper(database, store).reap() for _ in range(6)))
    assert await versions_left(database) == []


async def test_deleting_over_rest_tells_what_is_in_flight(plane: Plane, base: str, tmp_path: Path):
    acme = await plane.tenant("acme")
    kept = await push_ready(plane, acme, tmp_path / "0", seed=0)
    digest = await push_ready(plane, acme, tmp_path / "1", seed=1)
    refused = await acme.delete("adapters/bot/versions/1")
    assert problem(refused, 409)["code"] == "version_in_use"

    async with plane.database.acquire() as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await report(connection, "gw-1", 1, {})

        async def hear() -> None:
            """The gateway sees the retirement a while later, with two requests in flight."""
            await asyncio.sleep(0.3)
            generation = await catalog_generation(connection)
            await report(connection, "gw-1", generation, {f"{tenant_id}/bot/2": 2})

        heard = asyncio.create_task(hear())
        deleted = (await acme.delete("adapters/bot/versions/2")).json()
        await heard
        assert deleted == {"id": "bot@2", "deleted": True, "in_flight": 2, "object": "deleted"}
        assert plane.files() == {kept, digest}
        shown = (await acme.get("adapters/bot/versions/2")).json()
        assert (shown["state"], shown["retired_at"] is None) == ("retired", False)
        promoted = await acme.put("adapters/bot/aliases/prod", json={"version": 2})
        assert problem(promoted, 409)["code"] == "version_not_ready"
        await report(connection, "gw-1", await catalog_generation(connection), {})
        again = (await acme.delete("adapters/bot/versions/2")).json()
        await connection.execute("DELETE FROM gateways")
    assert again["in_flight"] == 0
    assert plane.files() == {kept}
    assert (await acme.get("adapters/bot/versions/2")).status_code == 404

    gone = (await acme.delete("adapters/bot")).json()
    assert gone == {"id": "bot", "deleted": True, "in_flight": 0, "object": "deleted"}
    assert plane.files() == set()
    assert (await acme.get("adapters")).json()["data"] == []


async def push_ready(plane: Plane, client: httpx.AsyncClient, folder: Path, seed: int) -> str:
    """The digest of a new version of `bot`."""
    digest = write_adapter(folder, seed=seed)
    files = {path.name: (path.name, path.read_bytes()) for path in folder.iterdir()}
    answer = await client.post("adapters", data={"name": "bot"}, files=files)
    assert answer.status_code == 201, answer.text
    await prove_all(plane.database)
    return digest


async def test_deleting_does_not_wait_for_ever(plane: Plane, base: str, tmp_path: Path):
    acme = await plane.tenant("acme")
    await push_ready(plane, acme, tmp_path / "0", seed=0)
    async with plane.database.acquire() as connection:
        await report(connection, "gw-1", 1, {})
    async with asyncio.timeout(20):
        assert (await acme.delete("adapters/bot")).json()["in_flight"] == 0
    assert len(plane.files()) == 1
    assert problem(await acme.get("adapters/bot"), 404)["code"] == "adapter_not_found"
