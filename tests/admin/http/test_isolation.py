"""Row-level security: what a query forgets to ask for, the database does not show.

Everything here holds for whatever tables there are: a new one must be filled below, or named as
nobody's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from admin.adapters import versions
from admin.adapters.retirement import retire_version
from admin.keys import keys
from admin.signing_keys import signing_keys
from store import queries
from store.database import APP_ROLE, EVERYTHING, NOTHING, Connection, Database
from store.errors import ApiError, DatabaseUnavailable
from store.queries import sql
from tests.admin.audit.test_audit import verified
from tests.admin.conftest import PEPPER, Plane
from tests.admin.lifecycle import add, add_credit, make_ready, make_tenant, report

NOBODYS = {
    "adapter_faults",
    "adapter_proofs",
    "approved_templates",
    "base_models",
    "catalog_generation",
    "gateways",
    "loose_contents",
    "prices",
    "schema_migrations",
    "usage_kept",
}
"""Tables without a tenant's rows; the migration says why of each."""
PUBLIC_KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIDVnJTvNA4nBN9QkhXyTEJm8n/ZPXkcpECxk/G8sjLv7"
OPERATORS = {"gateway_load", "idempotent_requests", "quota_holders", "usage_credits", "workers"}
"""Of them a tenant sees nothing."""

TABLES = """
SELECT oid, relname AS name, relrowsecurity AS is_guarded, relispartition AS is_part,
       (SELECT count(*) FROM pg_policy WHERE polrelid = c.oid) AS policies,
       EXISTS (SELECT FROM pg_attribute
               WHERE attrelid = c.oid AND attname = 'tenant_id') AS is_tenants
FROM pg_class c WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace"""
FIRST_COLUMN = """
SELECT attname FROM pg_attribute
WHERE attrelid = $1::text::regclass AND attnum > 0 ORDER BY attnum LIMIT 1"""
PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")


async def guarded_tables(connection: Connection) -> list[str]:
    rows = await connection.fetch(f"{TABLES} AND relrowsecurity AND NOT relispartition")
    return sorted(row["name"] for row in rows)


async def fill(connection: Connection, name: str, digit: str) -> str:
    """A row of the tenant in every table that has some of its but the queue of proofs; its id."""
    tenant_id = await make_tenant(connection, name)
    key, _ = await keys.create_key(connection, PEPPER, tenant_id, frozenset({"inference"}))
    await make_ready(connection, tenant_id, digit, chr(ord(digit) + 1))
    await versions.add_rejected(connection, tenant_id, "bot", {"code": "x"})
    public = f"ssh-ed25519 {PUBLIC_KEY}"
    await signing_keys.add_key(connection, tenant_id, "ci", public, by_tenant=True)
    alias = (tenant_id, "bot", "prod")
    canary = (1, {"1": 9, "2": 1}, None, "somebody", "canary", None, None)
    move = await connection.fetchval(sql["alias_point"], *alias, *canary)
    outcome = {"change": move, "version": 1, "requests": 1, "errors": 0, "ttft": [1]}
    await connection.execute(sql["outcomes_add"], f"gw-{name}", [outcome])
    await connection.execute(
        "INSERT INTO key_uses (key_id, last_used_at) VALUES ($1, now())", key.id
    )
    for subject, of_key in ((tenant_id, None), (key.id, key.id)):
        await connection.execute(
            "INSERT INTO quotas (subject, tenant_id, key_id, requests_per_minute)"
            " VALUES ($1, $2, $3, 10)",
            *(subject, tenant_id, of_key),
        )
        ask = {"subject": subject, "kind": "requests_per_minute", "start": "2026-01-01T00:00Z"}
        ask |= {"taken": 1, "returned": 0, "answered": 0, "need": 1, "want": 0, "call": 0}
        await connection.fetch(sql["quota_exchange"], f"gw-{subject}", 1, 60.0, [ask])
    row = {"request_id": f"req-{name}", "admitted_at": 1.8e9, "tenant_id": tenant_id}
    row |= {"key_id": key.id, "model": "tiny", "adapter": "bot", "adapter_version": 1}
    row |= {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 1, "duration_ms": 1.0}
    row |= {"finish_reasons": ["stop"], "worker": "w", "status": "completed", "gateway": "gw"}
    row |= {"metered_tokens": 6, "cost": 0, "leased": 0, "trace_id": None, "ttft_ms": 1.0}
    row |= {"input_cost": 0, "cached_input_cost": 0, "output_cost": 0}
    await connection.execute(sql["usage_make_room"], [row])
    await connection.execute(sql["usage_load"], [row])
    await add_credit(connection, f"c-{name}")
    token = hashlib.sha256(name.encode()).digest()
    await connection.execute(
        "INSERT INTO idempotent_requests (id, request, nonce) VALUES ($1, $1, $1)", token
    )
    row = {"id": f"worker-{name}", "address": "unix:/w", "status": {}}
    await connection.execute(sql["workers_report"], f"gw-{name}", [row])
    await report(connection, f"gw-{name}", 1, {})
    await connection.execute(sql["holdings_store"], tenant_id)
    await connection.execute(
        "INSERT INTO adapters (tenant_id, name, last_version) VALUES ($1, 'gone', 3)", tenant_id
    )
    await connection.execute(sql["adapter_delete"], tenant_id, "gone")
    await connection.execute(sql["gateway_load_report"], f"gw-{name}", {"seconds": 1})
    return tenant_id


class Two:
    """Two tenants, and connections that see one of them, all or nothing."""

    def __init__(self, database: Database, tenants: tuple[str, str]) -> None:
        self.database = database
        self.tenants = tenants

    async def rows(self, sees: str, table: str) -> set[str]:
        async with self.database.transaction(sees) as connection:
            found = await connection.fetch(f"SELECT to_jsonb(t)::text AS row FROM {table} t")
        return {row["row"] for row in found}


@pytest.fixture
async def two(dsn: str, database: Database) -> AsyncIterator[Two]:
    async with database.transaction() as connection:
        tenants = (await fill(connection, "acme", "a"), await fill(connection, "globex", "c"))
        for tenant_id, digit in zip(tenants, "45", strict=True):
            await add(connection, tenant_id, digit)
        await keys.create_key(connection, PEPPER, None)
    own = await Database.connect(dsn)
    yield Two(own, tenants)
    await own.close()


async def test_every_table_has_a_policy_or_is_nobodys(two: Two, owner: Database):
    async with owner.acquire() as connection:
        tables = await connection.fetch(TABLES)
        assert any(table["is_part"] for table in tables)
        for table in tables:
            may = {
                privilege
                for privilege in PRIVILEGES
                if await connection.fetchval(
                    "SELECT has_table_privilege($1, $2::oid, $3)",
                    *(APP_ROLE, table["oid"], privilege),
                )
            }
            assert not may & {"TRUNCATE", "REFERENCES", "TRIGGER"}, table["name"]
            if table["is_part"]:
                assert not may, table["name"]  # else its rows could be had past the parent's policy
            elif table["name"] in NOBODYS:
                assert not table["is_guarded"] and not table["is_tenants"], table["name"]
            else:
                assert table["is_guarded"] and table["policies"] == 1, table["name"]


async def test_each_sees_its_own_rows_and_no_others(two: Two):
    acme, globex = two.tenants
    async with two.database.acquire() as connection:
        tables = await guarded_tables(connection)
    assert {"tenants", "api_keys", "usage", "audit_log"} <= set(tables)
    for table in tables:
        seen = [await two.rows(sees, table) for sees in (acme, globex)]
        everything = await two.rows(EVERYTHING, table)
        assert await two.rows(NOTHING, table) == set(), table
        assert await two.rows("ten_000000000000", table) == set(), table
        assert len(everything) >= 2 and seen[0] | seen[1] <= everything, table
        if table in OPERATORS:
            assert seen == [set(), set()], table
        else:
            assert seen[0] and seen[1] and not seen[0] & seen[1], table
        if table in ("audit_log", "api_keys"):  # some rows are the operator's
            assert everything - seen[0] - seen[1], table
        elif table not in OPERATORS:
            assert seen[0] | seen[1] == everything, table


async def test_nobody_changes_anothers_rows(two: Two):
    """Not by UPDATE, DELETE or INSERT, and not by giving away what is its own."""
    acme, globex = two.tenants
    async with two.database.acquire() as connection:
        tables = await guarded_tables(connection)
    for table in tables:
        own = await two.rows(acme, table)
        foreign = (await two.rows(EVERYTHING, table) - own).pop()
        statements = {
            "UPDATE": f"UPDATE {table} SET ({{0}}) = ROW ({{0}})",
            "DELETE": f"DELETE FROM {table}",
        }
        for privilege, statement in statements.items():
            async with rolled_back(two.database, acme) as connection:
                if await connection.fetchval(
                    "SELECT has_table_privilege($1, $2)", table, privilege
                ):
                    column = await connection.fetchval(FIRST_COLUMN, table)
                    told = await connection.execute(statement.format(column))
                    assert told == f"{privilege} {len(own)}", table
        insert = (
            f"INSERT INTO {table} OVERRIDING SYSTEM VALUE"
            f" SELECT * FROM jsonb_populate_record(NULL::{table}, $1::text::jsonb)"
        )
        with pytest.raises(ApiError, match=r"row-level security|permission denied"):
            async with two.database.transaction(acme) as connection:
                await connection.execute(insert, foreign)
    with pytest.raises(ApiError, match="row-level security"):
        async with two.database.transaction(acme) as connection:
            await connection.execute("UPDATE quotas SET tenant_id = $1, subject = $1", globex)


class RollBack(Exception):
    pass


@asynccontextmanager
async def rolled_back(database: Database, sees: str) -> AsyncIterator[Connection]:
    with pytest.raises(RollBack):
        async with database.transaction(sees) as connection:
            yield connection
            raise RollBack


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE mine (i int)",
        "ALTER TABLE tenants DISABLE ROW LEVEL SECURITY",
        "ALTER TABLE audit_log DISABLE TRIGGER only_grows",
        "DROP POLICY tenant ON tenants",
        "CREATE POLICY all_of_it ON tenants USING (true)",
        "CREATE OR REPLACE FUNCTION audit_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'",
        "TRUNCATE usage",
        "DROP TABLE usage_20270115",
        "SELECT * FROM usage_20270115",
        "UPDATE usage SET cost = 0",
        "DELETE FROM usage",
        "UPDATE usage_hourly SET cost = 0",
        "UPDATE usage_totals SET cost = 0",
        "UPDATE alias_history SET reason = 'first'",
        "INSERT INTO audit_log (tenant_id, action, object, details) VALUES ('', '', '', '{}')",
        "UPDATE audit_log SET action = ''",
        "DELETE FROM audit_log",
        "INSERT INTO schema_migrations (number, name, sha256) VALUES (99, '', '')",
        "UPDATE usage_kept SET first_day = '2999-01-01'",
        "SET session_replication_role = replica",
        "SET row_security = off; SELECT * FROM tenants",
        "ALTER ROLE loraplex_app BYPASSRLS",
        "CREATE ROLE other",
        "SELECT pg_read_file('/etc/passwd')",
    ],
)
async def test_the_role_has_no_way_around(two: Two, statement: str):
    with pytest.raises(
        ApiError, match=r"permission denied|must be owner|affected by row-level security"
    ):
        async with two.database.transaction(two.tenants[0]) as connection:
            await connection.execute(statement)


async def test_the_role_owns_nothing_and_what_does_more_is_closed(two: Two, owner: Database):
    async with owner.acquire() as connection:
        role = await connection.fetchrow("SELECT * FROM pg_roles WHERE rolname = $1", APP_ROLE)
        owned = await connection.fetchval(
            "SELECT count(*) FROM pg_shdepend WHERE refclassid = 'pg_authid'::regclass"
            " AND refobjid = $1::text::regrole AND deptype = 'o'",
            APP_ROLE,
        )
        open_functions = await connection.fetch(
            "SELECT oid::regprocedure::text AS name, proconfig,"
            " EXISTS (SELECT FROM aclexplode(coalesce(proacl, acldefault('f', proowner)))"
            "         WHERE grantee = 0) AS is_public"
            " FROM pg_proc WHERE prosecdef AND pronamespace = 'public'::regnamespace"
        )
    assert role is not None
    attributes = ("rolsuper", "rolinherit", "rolcreaterole", "rolcreatedb", "rolcanlogin")
    assert [role[name] for name in attributes] == [False, True, False, False, False]
    assert not role["rolbypassrls"] and not role["rolreplication"]
    assert owned == 0
    assert len(open_functions) == 17
    for function in open_functions:
        assert not function["is_public"], function["name"]
        assert function["proconfig"] == ["search_path=public, pg_temp"], function["name"]


async def test_the_role_may_run_every_named_query(database: Database):
    """Planned and not run: what is not granted is refused at the start."""
    async with database.acquire() as connection:
        for name in sql:
            text = sql[name].rstrip().rstrip(";")
            try:
                await connection.execute(f"EXPLAIN (GENERIC_PLAN) {text}")
            except Exception as error:
                pytest.fail(f"{name}: {error}")


MUTATIONS = {
    "adapter_list": ("(a.tenant_id = $1 OR", "($1 <> '' OR", "adapters"),
    "version_list": ("v.tenant_id = $1 AND", "$1 <> '' AND", "adapters/bot/versions"),
    "tenant_find": ("(id = $1 OR name = $1)", "$1 <> '' ORDER BY name DESC", "adapters"),
}


@pytest.mark.parametrize("name", MUTATIONS)
async def test_a_query_without_its_filter_shows_no_more(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, name: str
):
    async with plane.database.transaction() as connection:
        await fill(connection, "acme", "a")
        await fill(connection, "globex", "c")
        for tenant, adapter, digit in (("acme", "ours", "1"), ("globex", "theirs", "2")):
            found = await connection.fetchval("SELECT id FROM tenants WHERE name = $1", tenant)
            await add(connection, found, digit, name=adapter)
    scopes = {"scopes": ["adapters:write"]}
    client = plane.bearing(str((await plane.key("acme", **scopes))["key"]))
    before, after, path = MUTATIONS[name]
    right = await client.get(path)
    everything = await plane.client.get(path, params={"tenant": "acme"})
    assert before in sql[name]
    monkeypatch.setitem(queries.sql, name, sql[name].replace(before, after))
    assert (await client.get(path)).text == right.text
    leaking = await plane.client.get(path, params={"tenant": "acme"})
    assert leaking.text != everything.text  # an admin's key sees what the filter kept away


async def test_a_shown_key_is_found_and_no_other(two: Two):
    async with two.database.acquire() as connection:
        assert await connection.fetch(sql["key_list"], two.tenants[0], "", 10) == []
        assert await keys.find_shown_keys(connection, ["000000000000"]) == {}
    async with two.database.transaction(EVERYTHING) as connection:
        (known, *_) = await keys.list_keys(connection, two.tenants[1], "", 10)
    async with two.database.acquire() as connection:
        found = await keys.find_shown_keys(connection, [known.id, "000000000000"])
    assert {key.tenant_id for key in found.values()} == {two.tenants[1]}


async def test_a_content_of_somebody_else_is_not_free(two: Two):
    """To a scope that does not see the version, its files would seem to be nobody's."""
    content = "c" * 64
    for sees in (NOTHING, two.tenants[0], EVERYTHING):
        async with two.database.transaction(sees) as connection:
            assert await connection.fetchval(sql["content_is_free"], content) is False
    async with two.database.transaction(NOTHING) as connection:
        assert await connection.fetchval(sql["content_is_free"], "9" * 64) is True


async def test_tenants_write_one_chain_of_which_each_sees_its_own(two: Two, database: Database):
    for tenant_id, digit in zip(two.tenants * 2, "6789", strict=True):
        async with two.database.transaction(tenant_id) as connection:
            await add(connection, tenant_id, digit)
    assert (await verified(database)).broken is None


async def test_a_tenants_work_is_done_in_its_own_scope(two: Two):
    """What another tenant had proved is uploaded, waits for its own proof, and is retired."""
    acme, _ = two.tenants
    async with two.database.transaction(acme) as connection:
        number = await add(connection, acme, "c")  # proved by the other tenant
        made = await versions.find_version(connection, acme, "bot", number)
        await report(connection, "gw-1", 1, {})
        await retire_version(connection, acme, "bot", number)
    assert made.state == "proving"


async def test_what_a_connection_says_ends_with_its_transaction(dsn: str, two: Two):
    """Also what was said by mistake for the session, before the next one gets the connection."""
    one = await Database.connect(dsn, max_size=1)
    who = "SELECT current_user || current_setting('loraplex.tenant')"
    try:
        async with one.transaction(two.tenants[0]) as connection:
            assert await connection.fetchval(who) == APP_ROLE + two.tenants[0]
        async with one.acquire() as connection:
            assert await connection.fetchval(who) == APP_ROLE
            await connection.execute("SELECT set_config('loraplex.tenant', '*', false)")
            await connection.execute("RESET ROLE")
        async with one.acquire() as connection:
            assert await connection.fetchval(who) == APP_ROLE
    finally:
        await one.close()


async def test_settings_of_a_connection(dsn: str):
    database = await Database.connect(dsn, application_name="loraplex-x", command_timeout=7)
    names = ("application_name", "statement_timeout", "lock_timeout")
    try:
        async with database.acquire() as connection:
            found = [await connection.fetchval(f"SHOW {name}") for name in names]
            idle = await connection.fetchval("SHOW idle_in_transaction_session_timeout")
        assert [*found, idle] == ["loraplex-x", "7s", "10s", "1min"]
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            async with database.transaction() as holder, database.transaction() as other:
                await holder.execute(sql["catalog_lock"])
                await other.execute("SET LOCAL lock_timeout = '10ms'")
                await other.execute(sql["catalog_lock"])
    finally:
        await database.close()


async def test_a_database_without_the_role_is_told_so(dsn: str):
    with pytest.raises(DatabaseUnavailable, match=r"no_such_role.*loraplex migrate"):
        await Database.connect(dsn, role="no_such_role")


async def test_a_proxy_that_drops_settings_is_refused(dsn: str, tmp_path: Path):
    """Else everybody would work as the owner, past every policy."""
    for dropped in (b"role", b"loraplex.tenant"):
        async with dropping(dsn, tmp_path, dropped) as proxied:
            with pytest.raises(DatabaseUnavailable, match="drops its settings"):
                await Database.connect(proxied, sees=EVERYTHING)


@asynccontextmanager
async def dropping(dsn: str, folder: Path, dropped: bytes) -> AsyncIterator[str]:
    """The URL of a proxy that leaves a setting out of what starts a connection."""
    head, _, host = dsn.rpartition("?host=")
    name = ".s.PGSQL.5432"

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        start = await reader.readexactly(size - 4)
        fields = start[4:-2].split(b"\0")
        kept = [
            part
            for pair in zip(fields[::2], fields[1::2], strict=True)
            if pair[0] != dropped
            for part in pair
        ]
        start = start[:4] + b"\0".join(kept) + b"\0\0"
        theirs, ours = await asyncio.open_unix_connection(str(Path(unquote(host)) / name))
        ours.write((len(start) + 4).to_bytes(4, "big") + start)
        await asyncio.gather(_pass(reader, ours), _pass(theirs, writer))

    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async with await asyncio.start_unix_server(accept, folder / name):
        yield f"{head}?host={quote(str(folder))}"


async def test_the_owner_sees_everything(two: Two, owner: Database):
    """Without saying so: a dump by the owner is whole."""
    async with owner.acquire() as connection:
        snapshot = await queries.load_catalog(connection)
    assert {tenant.id for tenant in snapshot.tenants} == set(two.tenants)
