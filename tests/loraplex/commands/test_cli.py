"""The command line as its users have it: a process that talks to a live admin plane."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from admin.tenants.tenants import create_tenant
from loraplex.cli import cli
from loraplex.errors import LoraplexError
from loraplex.private import path_digest
from loraplex.running import RunningServer, announced
from loraplex.settings import load_settings
from store.queries import sql
from tests import preloaded
from tests.adapters.files import write_adapter
from tests.admin.conftest import Plane
from tests.admin.lifecycle import claim, prove_all
from tests.planted import plant
from tests.preloaded import ROOT


async def run(plane: Plane, *arguments: str, code: int = 0, **environment: str) -> str:
    """Standard output; with another code than 0, standard error."""
    output, complaint = await run_for_both(plane, *arguments, code=code, **environment)
    return complaint if code else output


async def run_for_both(
    plane: Plane, *arguments: str, code: int = 0, **environment: str
) -> tuple[str, str]:
    """Standard output and standard error."""
    known = {
        "LORAPLEX_URL": plane.url.removesuffix("/admin/v1"),
        "LORAPLEX_KEY": plane.client.headers["authorization"].removeprefix("Bearer "),
        "LORAPLEX_DATA_DIR": "/nonexistent",
    }
    environment = os.environ | known | environment
    done = await asyncio.to_thread(preloaded.run, "loraplex", *arguments, environment=environment)
    assert done.status == code, done.stdout + done.stderr
    return done.stdout, done.stderr


async def test_tenants_and_keys(plane: Plane):
    assert (await run(plane, "tenant", "create", "acme")).startswith("acme (ten_")
    assert "already exists" in await run(plane, "tenant", "create", "acme", code=1)
    listed = json.loads(await run(plane, "tenant", "list", "--json"))
    assert [tenant["name"] for tenant in listed] == ["acme"]
    assert "acme" in await run(plane, "tenant", "list")
    change = ("tenant", "change", "acme", "--sharing-group")
    assert await run(plane, *change, "family") == "acme shares with group family\n"
    assert "family" in await run(plane, "tenant", "show", "acme")
    assert await run(plane, *change, "") == "acme shares with no other tenant\n"
    text = (await run(plane, "key", "create", "--tenant", "acme", "--name", "ci")).strip()
    assert (await plane.bearing(text).get("models")).status_code == 200
    keys = json.loads(await run(plane, "key", "list", "--tenant", "acme", "--json"))
    assert [key["name"] for key in keys] == ["ci"]
    revoked = json.loads(await run(plane, "key", "revoke", keys[0]["id"], "--json"))
    assert revoked["revoked_at"]
    assert (await plane.bearing(text).get("models")).status_code == 401
    unknown = await run(plane, "tenant", "list", code=1, LORAPLEX_KEY=text)
    assert "does not know the key of LORAPLEX_KEY" in unknown
    # Nothing answers the question.
    question = await run(plane, "tenant", "delete", "acme", code=130)
    assert f"Delete tenant acme ({listed[0]['id']}) with its keys and adapters? [y/N]" in question
    await run(plane, "tenant", "delete", "acme", "--yes")
    gone = await run(plane, "tenant", "show", "acme", code=1)
    assert "no tenant 'acme'; see `loraplex tenant list`" in gone


async def test_a_key_ends_after_a_span(plane: Plane):
    made = json.loads(await run(plane, "key", "create", "--admin", "--expires-at", "30d", "--json"))
    left = datetime.fromisoformat(made["record"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
    assert "neither 24h, 30d nor a date" in await run(
        plane, "key", "create", "--admin", "--expires-at", "soon", code=2
    )


async def test_an_admin_key_is_asked_for_by_name_and_the_last_one_stays(plane: Plane):
    refused = await run(plane, "key", "create", code=2)
    assert "give --tenant NAME, or --admin" in refused
    (own,) = json.loads(await run(plane, "key", "list", "--json"))
    ends = json.loads(await run(plane, "key", "create", "--admin", "--expires-at", "1d", "--json"))
    refused = await run(plane, "key", "revoke", own["id"], code=1)
    assert "the last admin key without an expiry" in refused
    await run(plane, "key", "revoke", ends["record"]["id"])
    await run(plane, "key", "create", "--admin")
    await run(plane, "key", "revoke", own["id"])


@pytest.fixture
async def gateway(plane: Plane) -> AsyncIterator[None]:
    """Finds every adapter right."""

    async def prove() -> None:
        while True:
            await prove_all(plane.database)
            await asyncio.sleep(0.05)

    proving = asyncio.create_task(prove())
    yield
    proving.cancel()


async def test_an_adapter_from_push_to_delete(
    plane: Plane, base: str, gateway: None, tmp_path: Path
):
    await run(plane, "tenant", "create", "acme")
    for seed in (0, 1):
        write_adapter(tmp_path / str(seed), seed=seed)
    push = ("adapter", "push", "--name", "bot", "--tenant", "acme")
    assert await run(plane, *push, str(tmp_path / "0")) == "bot@1 (prod)\n"
    assert await run(plane, *push, str(tmp_path / "1"), "--alias", "next") == "bot@2 (next)\n"

    async def adapter(*arguments: str, code: int = 0) -> str:
        return await run(plane, "adapter", *arguments, "--tenant", "acme", code=code)

    assert await adapter("canary", "bot@2", "--weight", "10") == (
        "bot@prod is now 90 % version 1, 10 % version 2\n"
    )
    assert await adapter("canary", "bot", "--stop") == "bot@prod is now version 1\n"
    assert json.loads(await adapter("promote", "bot@2", "--json"))["version"] == 2
    shown = json.loads(await adapter("show", "bot", "--json"))
    assert shown["aliases"] == {"next": 2, "prod": 2}
    assert await adapter("rollback", "bot") == "bot@prod is now version 1\n"
    moves = json.loads(await adapter("history", "bot", "--json"))
    reasons = [move["reason"] for move in moves]
    assert reasons == ["rollback", "promote", "promote", "canary", "first"]
    await run(plane, "tenant", "create", "globex")
    assert "prod=1" in await run(plane, "adapter", "list")
    assert "version\t2\n" in await adapter("show", "bot@2")
    assert "may pin 0" in await adapter("pin", "bot", code=1)
    await run(plane, "quota", "set", "--tenant", "acme", "--pin-bytes", "1MiB")
    assert await adapter("pin", "bot") == "bot@prod is now version 1, pinned\n"
    assert await adapter("unpin", "bot") == "bot@prod is now version 1\n"
    assert "NAME@ALIAS" in await adapter("unalias", "bot", code=2)
    assert await adapter("unalias", "bot@next", "--yes") == "deleted the alias bot@next\n"
    assert "prod" in await adapter("unalias", "bot@prod", "--yes", code=1)
    assert "prod" in await adapter("delete", "bot@1", "--yes", code=1)
    question = await adapter("delete", "bot", code=130)
    assert "Delete adapter bot of tenant acme with its versions (2) and aliases" in question
    assert await adapter("delete", "bot", "--yes") == "deleted bot\n"
    assert json.loads(await adapter("list", "--json")) == []


async def test_several_are_pushed_by_their_folders_and_a_manifest(
    plane: Plane, base: str, gateway: None, tmp_path: Path
):
    await run(plane, "tenant", "create", "acme")
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(tmp_path / name, seed=seed)
    (tmp_path / "two" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    manifest = tmp_path / "all.json"
    manifest.write_text('[{"folder": "three", "name": "drei", "alias": "next"}]')
    push = ("adapter", "push", "--tenant", "acme", "--manifest", str(manifest))
    folders = (str(tmp_path / "one"), str(tmp_path / "two"))
    told = await run(plane, *push, *folders, code=1)
    assert f"1 of 3 were not pushed:\nnumber 2, {tmp_path / 'two'}: the adapter cannot" in told
    assert "uploading 3 adapters: 100 %" in told
    assert "proving 2 adapters: 50 %\nproving 2 adapters: 100 %" in told
    listed = json.loads(await run(plane, "adapter", "list", "--json"))
    assert [(each["name"], set(each["aliases"])) for each in listed] == [
        ("drei", {"prod", "next"}),
        ("one", {"prod"}),
    ]
    pushed = json.loads(await run(plane, *push, "--json"))
    assert [(each["name"], each["version"]) for each in pushed] == [("drei", 1)]
    manifest.write_text('[{"folder": "one"}, {"folder": "two", "nam": "zwei"}]')
    assert "item 2: 'nam' is not one of name" in await run(plane, *push, code=2)


async def test_serving_data_goes_with_the_push(
    plane: Plane, base: str, gateway: None, tmp_path: Path
):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path / "a")
    serving, template = tmp_path / "serving.json", tmp_path / "chat.jinja"
    serving.write_text('{"stop": ["bye"], "metadata": {"run": "6", "by": "me"}}')
    template.write_text("{{ messages[0].content }}")
    key = (await run(plane, "key", "create", "--tenant", "acme")).strip()
    pushed = await run(
        plane,
        *("adapter", "push", str(tmp_path / "a"), "--name", "bot", "--json"),
        *("--serving", str(serving), "--chat-template", str(template), "--metadata", "run=7"),
        LORAPLEX_KEY=key,
    )
    shown = json.loads(pushed)["serving"]
    assert shown["stop"] == ["bye"]
    assert shown["metadata"] == {"run": "7", "by": "me"}
    assert (shown["template"]["text"], shown["template"]["approved"]) == (
        template.read_text(),
        False,
    )
    versions = await run(plane, "adapter", "show", "bot", "--tenant", "acme", COLUMNS="200")
    assert "awaiting_approval" in versions and "its chat template is not approved" in versions
    refused = await run(plane, "adapter", "promote", "bot@1", "--tenant", "acme", code=1)
    assert "loraplex adapter approve bot@1 --tenant acme" in refused
    command = ("adapter", "promote", "bot@1", "--alias", "raw", "--tenant", "acme")
    assert "bot@raw is now version 1" in await run(plane, *command, "--completions-only")
    approved = await run(plane, "adapter", "approve", "bot@1", "--tenant", "acme")
    assert "prod=1" in await run(plane, "adapter", "list", "--tenant", "acme")
    assert shown["template"]["digest"][:12] in approved
    command = (
        "adapter",
        "push",
        str(tmp_path / "a"),
        "--name",
        "bot",
        "--tenant",
        "acme",
        "--json",
    )
    for flags, is_approved in (((), False), (("--approve-template",), True)):
        template.write_text(f"{{{{ messages[0].content }}}} {len(flags)}")
        made = await run(plane, *command, "--chat-template", str(template), *flags)
        assert json.loads(made)["serving"]["template"]["approved"] is is_approved
    template.write_text("{% if %}")
    push = ("adapter", "push", str(tmp_path / "a"), "--name", "bot", "--tenant", "acme")
    bad = await run(plane, *push, "--chat-template", str(template), code=1)
    assert "not valid Jinja, line 1" in bad


async def test_a_push_need_not_wait(plane: Plane, base: str, tmp_path: Path):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    push = ("adapter", "push", str(tmp_path), "--name", "bot", "--tenant", "acme")
    assert await run(plane, *push, "--no-wait") == "bot@1 (proving)\n"
    listed = await run(plane, "adapter", "show", "bot", "--tenant", "acme", COLUMNS="200")
    assert "waiting for a worker that serves tiny" in listed


async def test_the_answer_to_an_upload_has_its_warnings(plane: Plane, base: str, tmp_path: Path):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 0}))
    push = ("adapter", "push", str(tmp_path), "--name", "bot", "--tenant", "acme", "--no-wait")
    (warning,) = json.loads(await run(plane, *push, "--json"))["warnings"]
    assert warning.startswith("the version equals its base model, because lora_alpha")


async def test_what_is_taken_of_other_files_of_a_folder_is_told(
    plane: Plane, base: str, tmp_path: Path
):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3}')
    push = ("adapter", "push", str(tmp_path), "--name", "bot", "--tenant", "acme", "--no-wait")
    _, told = await run_for_both(plane, *push)
    assert (
        "bot@1: taken from other files of the folder, because tiny has others: the chat template,"
        " temperature 0.5, stop token ids 3 (--weights-only leaves them)"
    ) in " ".join(told.split())
    output, told = await run_for_both(plane, *push, "--weights-only")
    assert "bot@2" in output and "taken from" not in told


async def test_a_refused_adapter_is_explained(plane: Plane, base: str, tmp_path: Path):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    push = ("adapter", "push", str(tmp_path), "--name", "bot", "--tenant", "acme")
    refused = await run(plane, *push, code=1)
    assert "loraplex: the adapter cannot be served (adapter.unsupported.dora)" in refused
    assert "  field    use_dora\n  got      true" in refused
    assert "  hint     Train with use_dora=False" in refused
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in await run(plane, *push, code=1)


async def test_what_is_wrong_without_the_files_is_told_before_they_are_sent(
    plane: Plane, base: str, tmp_path: Path
):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    scope = ("key", "create", "--tenant", "acme", "--scope", "usage:read")
    reader = (await run(plane, *scope)).strip()

    async def push(*arguments: str, name: str = "bot", **environment: str) -> str:
        command = ("adapter", "push", str(tmp_path), "--name", name, *arguments)
        return await run(plane, *command, code=1, **environment)

    acme = ("--tenant", "acme")
    for told, words in (
        (await push(), "an admin key must say whose: give 'tenant'"),
        (await push("--tenant", "globex"), "no tenant 'globex'"),
        (await push(*acme, "--model", "other"), "no base model 'other'"),
        (await push(*acme, "--model", "a/b"), "a name is 1 to 128 letters"),
        (await push(*acme, name="bot/2"), "a name is 1 to 128 letters"),
        (await push(LORAPLEX_KEY=reader), "lacks the scope admin or adapters:write"),
        (await push(LORAPLEX_KEY="lpx_x"), "does not know the key of LORAPLEX_KEY"),
        (await push(*acme, name=""), "a name is 1 to 128 letters"),
    ):
        assert words in told and "uploading" not in told, told


async def test_a_version_proved_wrong_is_explained(plane: Plane, base: str, tmp_path: Path):
    await run(plane, "tenant", "create", "acme")
    write_adapter(tmp_path)
    push = ("adapter", "push", str(tmp_path), "--name", "bot", "--tenant", "acme")
    pushing = asyncio.create_task(run(plane, *push, code=1))
    error = {"code": "adapter.proof.mismatch", "field": "q_proj", "got": "0.7", "hint": "Retry."}
    async with asyncio.timeout(60), plane.database.acquire() as connection:
        while not (claims := await claim(connection)):
            await asyncio.sleep(0.05)
        found = claims[0]
        rejected = (found.tenant_id, found.name, found.version, error)
        await connection.fetchval(sql["proving_rejected"], *rejected)
    told = await pushing
    assert "(adapter.proof.mismatch)" in told
    assert "  hint     Retry." in told


async def test_pages_are_followed(plane: Plane):
    async with plane.database.transaction() as connection:
        for i in range(101):
            await create_tenant(connection, f"t{i:03}")
    listed = json.loads(await run(plane, "tenant", "list", "--json"))
    assert [tenant["name"] for tenant in listed] == [f"t{i:03}" for i in range(101)]


Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs a command that starts nothing in this process, and returns the exit code and message
    with which it is refused."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)

    def run(arguments: list[str], **environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises((click.ClickException, LoraplexError)) as raised:
            cli(arguments, prog_name="loraplex", standalone_mode=False)
        match raised.value:
            case click.ClickException() as error:
                return error.exit_code, error.format_message()
            case error:
                return getattr(error, "exit_code", 1), str(error)

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 2, "No such command"),
        (["adapter", "promote", "bot"], 2, "NAME@VERSION"),
        (["adapter", "canary", "bot@2"], 2, "--weight"),
        (["adapter", "canary", "bot@2", "--weight", "100"], 2, "--weight"),
        (["adapter", "push", ".", "--name", "x", "--metadata", "y"], 2, "KEY=VALUE"),
        (["quota", "set", "--tenant", "x", "--pin-bytes", "much"], 2, "not a size"),
        (["model", "add", "x"], 2, "NAME=PATH"),
        (["config", "--memory", "much"], 2, "not a size"),
        (["config", "--config", "/none.toml"], 2, "none.toml"),
        (["tenant", "list"], 1, "nothing serves from"),
        (["usage", "--group-by", "tenant,day"], 2, "'day' is not one of tenant, model"),
        (["key", "create", "--scope", "all"], 2, "'adapters:write'"),
        (["completion", "csh"], 2, "'bash', 'zsh', 'fish'"),
        (["workers", "show"], 2, "ID"),
        (
            ["adapter", "canary", "bot@2", "--weight", "5", "--policy", "window_s=NaN"],
            2,
            "--policy",
        ),
        (["adapter", "canary", "bot@2", "--stop"], 2, "--stop and NAME"),
        (["adapter", "canary", "bot", "--stop", "--policy", "none"], 2, "--stop and NAME"),
        (["adapter", "push", ".", "--name", "bot", "--serving", "nan.json"], 2, "is not JSON"),
        (["chat", "bot", "--temperature", "nan"], 2, "--temperature"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(
    refused: Refused, arguments: list[str], code: int, words: str, tmp_path: Path
):
    (tmp_path / "nan.json").write_text('{"defaults": {"temperature": NaN}}')
    found, message = refused(arguments, LORAPLEX_DATA_DIR=str(tmp_path / "none"))
    assert found == code and words in message
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 2, "No such command"),
        (["config", "--memory", "much"], 2, "not a size"),
        (["tenant", "list"], 1, "nothing serves from"),
        (["migrate"], 2, "LORAPLEX_DATABASE_URL"),
        (["serve"], 2, "--model"),
        (["gateway", "--port", "0"], 2, "LORAPLEX_DATABASE_URL"),
        (["worker", "--model", "x"], 2, "--listen"),
        (["worker", "--listen", "unix:/x", "--model", "x"], 2, "NAME=DIGEST"),
        (["worker", "--listen", "w.sock"], 2, "'w.sock' is not unix:/PATH or tcp://HOST:PORT"),
        (["worker", "--listen", "tcp://127.0.0.1:1"], 2, "--insecure-transport"),
        (["worker", "--listen", "unix:/x", "--health", "x"], 2, "'x' is not HOST:PORT"),
        (["worker", "--listen", "unix:/x", "--advertise", "x"], 2, "'x' is not unix:/PATH"),
        (["worker", "--listen", "unix:/x", "--max-lora-rank", "8"], 2, "--max-lora-rank"),
        (["admin", "--max-lora-rank", "8", "--port", "0"], 2, "LORAPLEX_DATABASE_URL"),
        (["serve", "--demo", "--port", "65536"], 2, "port"),
        (["gateway", "--host", "192.0.2.1"], 2, "192.0.2.1:8000: Cannot assign"),
        (["serve", "--demo", "--data-dir", "/dev/null"], 2, "data_dir: File exists: /dev/null"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, words: str, tmp_path: Path):
    environment = {"PATH": os.environ["PATH"], "LORAPLEX_DATA_DIR": str(tmp_path / "none")}
    done = preloaded.run("loraplex", *arguments, environment=environment)
    assert (done.status, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "unix:/nonexistent/w"], "cannot listen on unix:/nonexistent/w: No such file"),
        (["--listen", "unix:/dev/null"], "cannot listen on unix:/dev/null: Address already in use"),
        (["--listen", "unix:/dev/null", "--model", f"x={'0' * 64}"], f"has no models/{'0' * 64}"),
    ],
)
def test_a_worker_that_cannot_begin_says_why(arguments: list[str], words: str, tmp_path: Path):
    done = preloaded.run(
        "loraplex",
        "worker",
        "--health",
        "127.0.0.1:0",
        *arguments,
        environment={"PATH": os.environ["PATH"], "LORAPLEX_DATA_DIR": str(tmp_path)},
    )
    assert (done.status, words in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # Without the check these name a list, admin keys, everybody's usage or no anchor.
        (["tenant", "show", ""], "'' cannot be a name"),
        (["tenant", "delete", "..", "--yes"], "'..' cannot be a name"),
        (["key", "create", "--tenant", ""], "'' cannot be a name"),
        (["key", "list", "--tenant", ""], "'' cannot be a name"),
        (["key", "revoke", ""], "'' cannot be a name"),
        (["quota", "show", "--tenant", ""], "'' cannot be a name"),
        (["quota", "show", "--tenant", "", "--key", "x"], "give --tenant or --key"),
        (["model", "show", ""], "'' cannot be a name"),
        (["adapter", "show", ""], "'' cannot be a name"),
        (["adapter", "history", "bot", "--alias", ""], "'' cannot be a name"),
        (["price", "remove", ""], "'' cannot be a name"),
        (["workers", "show", ""], "'' cannot be a name"),
        (["audit", "list", "--tenant", ""], "'' cannot be a name"),
        (["audit", "verify", "--anchor", ""], "'' is not SEQ:HASH"),
    ],
)
def test_a_name_that_a_script_lost_is_nobodys(refused: Refused, arguments: list[str], words: str):
    code, message = refused(arguments, LORAPLEX_URL="http://127.0.0.1:9", LORAPLEX_KEY="x")
    assert code == 2 and words in message


async def test_a_model_for_another_machine_is_not_copied_here(plane: Plane, tmp_path: Path):
    place = {"LORAPLEX_URL": "http://192.0.2.1:8000", "LORAPLEX_DATA_DIR": str(tmp_path / "data")}
    told = await run(plane, "model", "add", f"x={tmp_path}", code=1, **place)
    assert "is another machine" in told and "LORAPLEX_STORE" in told
    assert not (tmp_path / "data").exists()
    nowhere = await run(plane, "model", "add", f"x={tmp_path}", code=1, LORAPLEX_URL="")
    assert "nothing serves from" in nowhere


async def test_a_name_ends_where_it_ends(plane: Plane):
    await run(plane, "tenant", "create", "acme")
    for name in ("acme?x=1", "acme#x", "acme/keys"):
        await run(plane, "tenant", "delete", name, "--yes", code=1)
    assert "acme" in await run(plane, "tenant", "list")


def serving(data_dir: Path, url: str) -> RunningServer:
    return RunningServer(url=url, admin_url=url, management_url=url, pid=1, data_dir=data_dir)


async def test_keys_of_a_data_directory_are_for_who_serves_from_it(plane: Plane, tmp_path: Path):
    url = plane.url.removesuffix("/admin/v1")
    key = plane.client.headers["authorization"].removeprefix("Bearer ")
    (tmp_path / "keys.json").write_text(json.dumps({"admin": key, "tenants": {}}))

    async def ask(url: str, code: int = 0) -> str:
        places = {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_URL": url, "LORAPLEX_KEY": ""}
        return await run(plane, "tenant", "list", code=code, **places)

    with announced(serving(tmp_path, url)):
        for given in ("", url, f"{url}/"):
            await ask(given)
    num_connected = 0

    async def stranger(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connected
        num_connected += 1
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    other = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert f"set LORAPLEX_KEY: {tmp_path} has no key for {other}" in await ask(other, code=1)
    assert num_connected == 0
    server.close()


@pytest.mark.parametrize(
    ("arguments", "key", "borne"),
    [
        ((), "lpx_own", "lpx_own"),
        (("--tenant", "globex"), "lpx_own", "lpx_globex"),
        (("--tenant", "globex"), "", "lpx_globex"),
        ((), "", "lpx_acme"),
        (("--tenant", "initech"), "lpx_own", "lpx_own"),
        (("--tenant", "initech"), "", None),
    ],
)
async def test_a_chat_is_the_tenants_that_was_named(
    tmp_path: Path, arguments: tuple[str, ...], key: str, borne: str | None
):
    heads: list[str] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    keys = {"admin": "", "tenants": {"acme": "lpx_acme", "globex": "lpx_globex"}}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    with announced(serving(tmp_path, url)):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loraplex", "chat", "bot", *arguments),
            env=os.environ | {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_KEY": key},
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate(b"Hello!\n")
    assert process.returncode == 1
    if borne is None:
        assert heads == [] and b"set LORAPLEX_KEY" in err
    else:
        assert f"authorization: Bearer {borne}\r\n" in heads[0]
    server.close()


def test_what_is_not_utf_8_is_told_so(tmp_path: Path):
    places = {"LORAPLEX_URL": "http://127.0.0.1:9", "LORAPLEX_KEY": "x"}
    for arguments, said in ((["chat", "bot"], b"\xff\n"), (["tenant", "show", b"\xff"], b"")):
        done = subprocess.run(
            [sys.executable, "-m", "loraplex", *arguments],
            env={"PATH": os.environ["PATH"], "LORAPLEX_DATA_DIR": str(tmp_path), **places},
            cwd=ROOT,
            input=said,
            capture_output=True,
        )
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.startswith(b"loraplex: what was given is not UTF-8")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LORAPLEX_URL": "http://[::1"}, "LORAPLEX_URL: Invalid port"),
        ({"LORAPLEX_KEY": "lpx_é"}, "LORAPLEX_KEY: an API key has only printable ASCII"),
        ({"LORAPLEX_KEY": "lpx_a\n"}, "LORAPLEX_KEY: an API key has only printable ASCII"),
        ({"LORAPLEX_DATA_DIR": "."}, "serve.json: Input data was truncated"),
    ],
)
def test_what_is_no_server_and_no_key_is_told(
    tmp_path: Path, environment: dict[str, str], words: str
):
    (tmp_path / "serve.json").write_text('{"url": "http')
    given = {"LORAPLEX_URL": "http://127.0.0.1:9", "LORAPLEX_KEY": "x", "HOME": "/nonexistent"}
    done = preloaded.run(
        "loraplex",
        "tenant",
        "list",
        environment={**given, "PYTHONPATH": str(ROOT)} | environment,
        folder=tmp_path,
    )
    assert (done.status, words in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["tenant", "list"], "serve.json"),
        (["worker", "--listen", "unix:/x"], "worker-{digest}.json"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(arguments: list[str], name: str, tmp_path: Path):
    file = tmp_path / "data" / name.format(digest=path_digest(Path("unix:/x")))
    file.mkdir(parents=True)
    done = preloaded.run(
        "loraplex",
        *arguments,
        environment={"PYTHONPATH": str(ROOT), "LORAPLEX_DATA_DIR": str(tmp_path / "data")},
        folder=tmp_path,
    )
    told = done.stderr.splitlines()[-1]
    assert (done.status, told) == (1, f"loraplex: Is a directory: {file}"), done.stderr


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path):
    marks = tmp_path / "marks"
    plant(tmp_path, marks)
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "config"],
        env={"HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
    )
    assert (done.returncode, list(marks.iterdir())) == (0, []), done.stderr


def test_nobody_there_is_told_so(tmp_path: Path):
    places = {"LORAPLEX_URL": "http://127.0.0.1:9", "LORAPLEX_KEY": "x"}
    done = preloaded.run("loraplex", "tenant", "list", environment=places)
    assert done.status == 1
    assert "no answer from http://127.0.0.1:9" in done.stderr


def test_config_prints_what_is_effective(tmp_path: Path):
    done = preloaded.run(
        "loraplex",
        "config",
        "--json",
        "--port",
        "1",
        environment={"LORAPLEX_HOST": "::1", "LORAPLEX_KEY": "hunter2", "HOME": str(tmp_path)},
    )
    shown = json.loads(done.stdout)
    assert (shown["port"], shown["host"], shown["key"]) == (1, "::1", "(set)")
    assert shown["data_dir"] == str(tmp_path / ".loraplex")


def test_config_is_written_as_a_file_of_settings_is(tmp_path: Path):
    """And is read back as the same."""
    given = {
        "LORAPLEX_DATA_DIR": str(tmp_path / 'a "quoted" ü'),
        "LORAPLEX_MODELS": "my.base=/x,b=/y z",
        "LORAPLEX_WORKERS": "unix:/run/w1,unix:/run/w2",
        "LORAPLEX_TRUSTED_PROXIES": "10.0.0.0/8",
        "LORAPLEX_INSECURE_TRANSPORT": "true",
        "LORAPLEX_ADAPTER_MEMORY": "1K:2M",
        "LORAPLEX_THREADS": "3",
        "LORAPLEX_KEY": "hunter2",
    }
    file = tmp_path / "shown.toml"
    with file.open("w") as out:
        subprocess.run([sys.executable, "-m", "loraplex", "config"], env=given, stdout=out)
    lines = file.read_text().splitlines()
    assert 'workers = ["unix:/run/w1", "unix:/run/w2"]' in lines
    assert "# key = (set)" in lines and "# url =" in lines
    read = load_settings({}, {"LORAPLEX_KEY": "hunter2"}, file)
    assert read.shown() == load_settings({}, given).shown()


OUTPUTS = (["config"], ["config", "--json"], ["--help"])


def print_to(stdout: int, arguments: list[str], home: Path) -> tuple[int, str]:
    """Status and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", *arguments],
        env={"HOME": str(home), "PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_output_that_cannot_be_written_is_told(arguments: list[str], tmp_path: Path):
    with open("/dev/full", "w") as full:
        code, told = print_to(full.fileno(), arguments, tmp_path)
    assert told == "loraplex: the output cannot be written: No space left on device\n"
    assert code == 1


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_a_reader_that_has_enough_is_told_nothing(arguments: list[str], tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    assert print_to(writing, arguments, tmp_path) == (1, "")
    os.close(writing)


async def test_tables_too_need_somewhere_to_go(plane: Plane):
    await run(plane, "tenant", "create", "acme")
    for arguments in ((), ("--json",)):
        shell = f"{sys.executable} -m loraplex tenant list {' '.join(arguments)} > /dev/full"
        process = await asyncio.create_subprocess_shell(
            shell,
            env=os.environ
            | {
                "LORAPLEX_URL": plane.url.removesuffix("/admin/v1"),
                "LORAPLEX_KEY": plane.client.headers["authorization"].removeprefix("Bearer "),
            },
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await process.communicate()
        assert process.returncode == 1
        assert told == b"loraplex: the output cannot be written: No space left on device\n"


async def test_migrate(empty_dsn: str):
    environment = os.environ | {"LORAPLEX_DATABASE_URL": empty_dsn}
    for expected in ("0001_pre_baseline.sql", "nothing to do"):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "loraplex", "migrate"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert expected in done.stdout, done.stderr
