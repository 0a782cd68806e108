"""The command line as its users have it: a process that talks to a live admin plane."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from admin.tenants import create_tenant
from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane


async def run(plane: Plane, *arguments: str, code: int = 0, **environment: str) -> str:
    """Standard output; with another code than 0, standard error."""
    known = {
        "LORAPLEX_URL": plane.url.removesuffix("/admin/v1"),
        "LORAPLEX_KEY": plane.client.headers["authorization"].removeprefix("Bearer "),
        "LORAPLEX_DATA_DIR": "/nonexistent",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex", *arguments),
        env=os.environ | known | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == code, out + err
    return err if code else out


async def test_tenants_and_keys(plane: Plane):
    assert (await run(plane, "tenant", "create", "acme")).startswith("acme (ten_")
    assert "already exists" in await run(plane, "tenant", "create", "acme", code=1)
    listed = json.loads(await run(plane, "tenant", "list", "--json"))
    assert [tenant["name"] for tenant in listed] == ["acme"]
    assert "acme" in await run(plane, "tenant", "list")
    text = (await run(plane, "key", "create", "--tenant", "acme", "--name", "ci")).strip()
    assert (await plane.bearing(text).get("models")).status_code == 200
    keys = json.loads(await run(plane, "key", "list", "--tenant", "acme", "--json"))
    assert [key["name"] for key in keys] == ["ci"]
    await run(plane, "key", "revoke", keys[0]["id"])
    assert (await plane.bearing(text).get("models")).status_code == 401
    await run(plane, "tenant", "delete", "acme", "--yes")
    assert "no tenant" in await run(plane, "tenant", "show", "acme", code=1)


async def test_an_adapter_from_push_to_delete(plane: Plane, base: str, tmp_path: Path):
    await run(plane, "tenant", "create", "acme")
    for seed in (0, 1):
        write_adapter(tmp_path / str(seed), seed=seed)
    push = ("adapter", "push", "--name", "bot", "--tenant", "acme")
    assert await run(plane, *push, str(tmp_path / "0")) == "bot@1 (prod)\n"
    assert await run(plane, *push, str(tmp_path / "1"), "--alias", "next") == "bot@2 (next)\n"
    of_acme = ("--tenant", "acme")
    assert "version 2" in await run(plane, "adapter", "promote", "bot@2", *of_acme)
    shown = json.loads(await run(plane, "adapter", "show", "bot", "--json", *of_acme))
    assert shown[0]["aliases"] == {"next": 2, "prod": 2}
    assert "version 1" in await run(plane, "adapter", "rollback", "bot", *of_acme)
    assert "prod=1" in await run(plane, "adapter", "list", *of_acme)
    refused = await run(plane, "adapter", "delete", "bot@1", "--yes", *of_acme, code=1)
    assert "prod" in refused
    await run(plane, "adapter", "delete", "bot", "--yes", *of_acme)
    assert json.loads(await run(plane, "adapter", "list", "--json", *of_acme)) == []


async def test_a_refused_adapter_is_explained(plane: Plane, base: str, tmp_path: Path):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    push = ("adapter", "push", str(tmp_path), "--name", "bot", "--tenant", "acme")
    assert "use_dora" in await run(plane, *push, code=1)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in await run(plane, *push, code=1)


async def test_pages_are_followed(plane: Plane):
    async with plane.database.transaction() as connection:
        for i in range(101):
            await create_tenant(connection, f"t{i:03}")
    listed = json.loads(await run(plane, "tenant", "list", "--json"))
    assert [tenant["name"] for tenant in listed] == [f"t{i:03}" for i in range(101)]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 2, "No such command"),
        (["adapter", "promote", "bot"], 2, "NAME@VERSION"),
        (["model", "add", "x"], 2, "NAME=PATH"),
        (["config", "--memory", "much"], 2, "not a size"),
        (["config", "--config", "/none.toml"], 2, "none.toml"),
        (["tenant", "list"], 1, "nothing serves from"),
        (["migrate"], 2, "LORAPLEX_DATABASE_URL"),
        (["serve"], 2, "--model"),
        (["gateway", "--port", "0"], 2, "LORAPLEX_DATABASE_URL"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, words: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", *arguments],
        env={"PATH": os.environ["PATH"], "LORAPLEX_DATA_DIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "none").exists()


def test_nobody_there_is_told_so(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "tenant", "list"],
        env={"LORAPLEX_URL": "http://127.0.0.1:9", "LORAPLEX_KEY": "x"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no answer from http://127.0.0.1:9" in done.stderr


def test_config_prints_what_is_effective(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "config", "--json", "--port", "1"],
        env={"LORAPLEX_HOST": "::1", "LORAPLEX_KEY": "hunter2", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    shown = json.loads(done.stdout)[0]
    assert (shown["port"], shown["host"], shown["key"]) == (1, "::1", "(set)")
    assert shown["data_dir"] == str(tmp_path / ".loraplex")


async def test_migrate(empty_dsn: str):
    environment = os.environ | {"LORAPLEX_DATABASE_URL": empty_dsn}
    for expected in ("0001_pre_catalog.sql", "nothing to do"):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "loraplex", "migrate"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert expected in done.stdout, done.stderr
