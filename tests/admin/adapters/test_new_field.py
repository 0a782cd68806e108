"""The worked examples of docs/understand/extending.md: a declaration adds a field to a version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from tools.source_tree import ROOT

PAGE = ROOT / "docs/understand/extending.md"
DECLARE = """
import importlib.util, sys
from pathlib import Path

declaration, place, *arguments = sys.argv[1:]
spec = importlib.util.find_spec("store.records")
text = Path(spec.origin).read_text()
assert text.count(place) == 1
records = importlib.util.module_from_spec(spec)
sys.modules["store.records"] = records
text = text.replace(place, f"{place}    {declaration}\\n")
exec(compile(text, spec.origin, "exec"), vars(records))
"""
SERVING = """
import json

from admin.adapters.schemas import ServingView
from admin.adapters.serving_data import parse_serving
from gateway.catalog.resolved_model import AdapterCard
from gateway.app import ROUTES
from gateway.http.openapi import document
from store.errors import Invalid
from tests.admin.http.test_openapi import DOCUMENT
import msgspec

gateway = document(ROUTES)

serving = parse_serving('{"reasoning_format": "think"}')
stored = msgspec.json.decode(msgspec.json.encode(serving), type=records.ServingData)
assert stored.shared()["reasoning_format"] == "think"
try:
    parse_serving('{"reasoning_format": "loud"}')
except Invalid as error:
    assert "reasoning_format" in str(error)
else:
    raise AssertionError
for view in (ServingView, AdapterCard):
    assert "reasoning_format" in view.__struct_fields__
for document, name in ((DOCUMENT, "ServingView"), (gateway, "AdapterCard")):
    field = document["components"]["schemas"][name]["properties"]["reasoning_format"]
    assert {"think", "none"} <= set(json.dumps(field).split('"')), field
"""
COLUMN = """
import asyncio, json

from click.testing import CliRunner

from loraplex.cli import cli
from store.database import EVERYTHING, Database
from store.queries import load_catalog
from tests.adapters.files import write_adapter
from tests.admin.conftest import CONFIG, PEPPER, Plane, write_model
from tests.admin.lifecycle import prove_all
from tests.admin.serve import administration

dsn, folder = arguments[0], Path(arguments[1])

async def main():
    database = await Database.connect(dsn, sees=EVERYTHING)
    own = await Database.connect(dsn)
    async with administration(own, folder / "store", CONFIG, has_upkeep=False) as admin:
        url = str(admin.base_url)
        plane = Plane(url, database, folder / "store")
        key = admin.headers["authorization"].removeprefix("Bearer ")
        url = url.partition("/admin/")[0]
        await check(plane, admin, {"LORAPLEX_URL": url, "LORAPLEX_KEY": key})
    await own.close()
    await database.close()

async def check(plane, admin, environment):
    async def run(*arguments):
        done = await asyncio.to_thread(CliRunner().invoke, cli, arguments, env=environment)
        return done.exit_code, f"{done.output}{done.exception or ''}"

    write_model(plane.store, "b" * 64)
    assert (await admin.post("models", json={"name": "tiny", "digest": "b" * 64})).is_success
    assert (await admin.post("tenants", json={"name": "acme"})).is_success
    write_adapter(folder / "bot")
    push = ("adapter", "push", str(folder / "bot"), "--tenant", "acme", "--no-wait", "--language")
    code, told = await run(*push, "x" * 36)
    assert code == 1 and "language" in told and "35" in told, told
    code, told = await run(*push, "de-CH")
    assert code == 0, told
    code, told = await run("adapter", "show", "bot@1", "--tenant", "acme")
    assert code == 0 and "language\\tde-CH\\n" in told, told
    assert "Language of the answers" in (await run("adapter", "push", "--help"))[1]
    await prove_all(plane.database)
    async with plane.database.acquire() as connection:
        (version,) = (await load_catalog(connection)).versions
    assert version.language == "de-CH"
    schemas = (await admin.get("schema")).json()
    content = schemas["paths"]["/admin/v1/adapters"]["post"]["requestBody"]["content"]
    form, body = content["multipart/form-data"], content["application/json"]
    assert form["schema"]["properties"]["language"] == {"type": "string"}
    assert "maxLength" in json.dumps(body["schema"]["properties"]["language"])

asyncio.run(main())
"""


def section(title: str) -> str:
    text = PAGE.read_text().split(f"### {title}\n")[1].split("\n##")[0]
    assert 1 <= len(re.findall(r"^\d\. ", text, re.MULTILINE)) <= 5
    return text


def declaration(text: str, name: str) -> str:
    return " ".join(re.findall(rf"`({name}: [^`]+)`", text)[0].split())


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", DECLARE + script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_serving_data_is_declared_once() -> None:
    """Uploads take it and refuse other values, rows keep it, and both planes show it."""
    declared = declaration(section("A field of its serving data"), "reasoning_format")
    run(SERVING, declared, "    tool_format: ToolFormat | None = None\n")


@pytest.mark.full
async def test_a_column_is_declared_once(dsn: str, tmp_path: Path) -> None:
    """The command line pushes and prints it, its bound is kept, its column stores it, and a
    gateway's catalog has it."""
    text = section("A field with a column")
    connection = await asyncpg.connect(dsn)
    await connection.execute(re.findall(r"`(ALTER TABLE [^`]+)`", text)[0])
    await connection.close()
    place = '    name: str\n    """Name of the adapter."""\n'
    run(COLUMN, declaration(text, "language"), place, dsn, str(tmp_path))
