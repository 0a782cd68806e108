"""A database, a store and unloaded usage that an earlier version wrote serve after an upgrade.

`write.py` wrote each folder beside this file; its name is the version that ran.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from admin.migrate import load_migrations, migrate
from loraplex.box.postgres import find_binaries
from loraplex.roles.bootstrap import migrate_database
from store.database import Database
from tests.e2e import demo
from tests.postgres import fresh_database, schema_of
from tests.stack import Stack, running

pytestmark = pytest.mark.full

WRITTEN = Path(__file__).parent / "0.1.0"
NUM_BEFORE = 1
"""Migrations that the earlier version had: the baseline of 0.1.0."""
WITHOUT_TRIGGERS = "SET session_replication_role = replica"
EMPTY = "TRUNCATE schema_migrations, catalog_generation, usage_kept, quota_holders CASCADE"
"""Tables to which migrations add rows."""
LOAD_TIMEOUT_S = 60.0
KEEP_DAYS = 36500
"""Usage of the day on which the fixture was written is kept whenever the test runs."""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads((WRITTEN / "facts.json").read_text())


async def migrate_before(dsn: str, facts: dict[str, Any]) -> None:
    """Applies the migrations that the earlier version had, and makes the partition that it used."""
    database = await Database.connect(dsn, role=None, max_size=1)
    await migrate(database, load_migrations()[:NUM_BEFORE])
    async with database.acquire() as connection:
        day = datetime.fromisoformat(facts["since"]).date()
        await connection.execute("SELECT usage_make_partition($1)", day)
    await database.close()


@pytest.fixture(scope="module")
def dsn(facts: dict[str, Any]) -> Iterator[str]:
    """The database that the earlier version left."""
    with fresh_database(migrated=False) as dsn:
        asyncio.run(migrate_before(dsn, facts))
        psql = [str(find_binaries() / "bin/psql"), "--quiet", "--no-psqlrc"]
        psql += ["-v", "ON_ERROR_STOP=1", "-c", WITHOUT_TRIGGERS, "-c", EMPTY]
        psql += [f"--file={WRITTEN / 'rows.sql'}", dsn]
        subprocess.run(psql, check=True, stdout=subprocess.DEVNULL)
        yield dsn


@pytest.fixture(scope="module")
def upgraded(
    dsn: str, facts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """This version on what the earlier one left; `serve` itself migrates the database."""
    home = tmp_path_factory.mktemp("upgrade") / "home"
    shutil.copytree(WRITTEN / "home", home)
    for secret in ("keys.json", "pepper"):
        (home / secret).chmod(0o600)  # git keeps no such modes
    model = home / "store" / "models" / facts["digest"]
    settings = {"database_url": dsn, "dtype": "float32", "threads": 1, "usage_days": KEEP_DAYS}
    with running(Stack(home, "--model", f"{facts['model']}={model}", **settings)) as stack:
        yield stack


def test_the_schema_is_that_of_a_new_database(upgraded: Stack, dsn: str) -> None:
    """Only newer migrations are applied, and those that wait for the roll-out when asked for."""
    newer = [file.name for file in load_migrations()[NUM_BEFORE:] if not file.is_post]
    assert upgraded.log.count("migrations applied") == bool(newer)
    assert f"migrations applied: {', '.join(newer)}" in upgraded.log or not newer
    asyncio.run(migrate_database(dsn, with_post=True))
    with fresh_database() as new:
        assert schema_of(dsn) == schema_of(new)


def test_usage_is_reported_with_what_was_not_loaded(upgraded: Stack, facts: dict[str, Any]) -> None:
    expected = facts["loaded"] | {facts["unloaded"]: facts["loaded"][facts["unloaded"]] + 1}
    query = {"group_by": "adapter,adapter_version", "start": facts["since"], "end": facts["until"]}
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    with upgraded.admin as admin:
        while True:
            sums = admin.get("/usage", params=query).raise_for_status().json()["data"]
            found = {f"{s['adapter']}@{s['adapter_version']}": s["requests"] for s in sums}
            if found == expected:
                break
            assert found == facts["loaded"] and time.monotonic() < deadline, found
            time.sleep(0.1)


def test_limits_prices_and_the_audit_chain_are_kept(upgraded: Stack, facts: dict[str, Any]) -> None:
    with upgraded.admin as admin:
        for path, kept in (
            ("/tenants/acme/quota", facts["limits"]),
            (f"/prices/{facts['model']}", facts["price"]),
        ):
            shown = admin.get(path).raise_for_status().json()
            assert {name: shown[name] for name in kept} == kept
    upgraded.cli("audit", "verify")


def test_models_and_adapters_answer_as_before(upgraded: Stack, facts: dict[str, Any]) -> None:
    """Up to the first id without a token, which 0.1.0 drew from the rows that pad the output
    matrix."""
    folder = WRITTEN / "home/store/models" / facts["digest"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for asked, answer in facts["answers"].items():
        before = list(takewhile(tokenizer.id_to_token, answer))
        assert len(before) > 1
        tenant, model = asked.split()
        with upgraded.openai(facts["keys"][tenant], timeout=60) as client:
            assert demo.complete(client, model, facts["prompt"], len(before)) == before, asked


def test_keys_open_what_they_opened(upgraded: Stack, facts: dict[str, Any]) -> None:
    assert upgraded.keys["admin"] == facts["keys"]["admin"]
    with upgraded.openai(facts["keys"]["globex"]) as client:
        assert {model.id for model in client.models.list()} >= {"helper", facts["model"]}
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="bot", prompt="x")
    with (
        upgraded.openai(facts["keys"]["revoked"]) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
