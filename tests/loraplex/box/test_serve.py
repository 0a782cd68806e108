"""`loraplex serve` as a whole, with a tiny model: from nothing to text, and through every crash."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from loraplex.box.postgres import EmbeddedPostgres
from loraplex.probe import answers_ok
from tests.doubles import make_adapter, make_model
from tests.loraplex.box.test_postgres import is_running
from tests.plane import free_port, product, python, variables
from tests.planted import plant
from tests.postgres import fresh_database
from tests.stack import Stack, running
from tests.terminal import terminal
from tests.waiting import until

pytestmark = pytest.mark.full

UPLOADED = ("adapter_config.json", "adapter_model.safetensors")
SETTINGS = {"memory": "64MiB", "threads": 1, "dtype": "float32"}


def loraplex(
    *arguments: str,
    stdin: str = "",
    environment: Mapping[str, str] = os.environ,
    **settings: object,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python("loraplex", *arguments),
        env={**environment, **variables(**settings)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def serve(model: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Runs a `loraplex serve` that is refused."""
    return loraplex("serve", "--model", model, **{"port": 0, **settings})


class Killable(Stack):
    @property
    def environment(self) -> dict[str, str]:
        """Of a command that has no key of its own."""
        return dict(self._plane.environment)

    def name_no_model(self) -> None:
        """Starts as `loraplex serve` from now on."""
        self._plane.runs = self._plane.runs[:2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    """Started as `cd model-folder && loraplex serve --model tiny=.`, of a stranger's folder."""
    command = [str(Path(sys.executable).with_name("loraplex"))]
    place = tmp_path_factory.mktemp("serve")
    stack = Killable(place, "--model", "tiny=.", command=command, cwd=model, **SETTINGS)
    for folder in (model, stack.data_dir):
        plant(folder, marks(stack))
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        home = EmbeddedPostgres(stack.data_dir).home
        subprocess.run(["rm", "-rf", str(home)], check=True)


def marks(stack: Stack) -> Path:
    return stack.data_dir.with_name("marks")


def children(pid: int) -> dict[str, int]:
    """Pids of a process's children by what they are."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                command = (entry / "cmdline").read_text().split("\0")
                kinds = {"loraplex.roles.worker_process": "worker", "gateway": "gateway"}
                kind = next((kinds[word] for word in command if word in kinds), "postgres")
                found[kind] = int(entry.name)
    return found


def names(stack: Stack, key: str) -> list[str]:
    with stack.openai(key) as client:
        return [model.id for model in client.models.list()]


def say(stack: Stack, model: str, key: str) -> str:
    with stack.openai(key) as client:
        messages = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
        )
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def acme(stack: Stack, model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tenant's key; its adapter `bot` is there."""
    key = stack.create_tenant("acme")
    folder = make_adapter(model, tmp_path_factory.mktemp("adapter"), b_std=0.5)
    assert stack.push(folder, "bot", "acme")["state"] == "ready"
    return key


def test_text_from_the_base_and_from_an_adapter(stack: Stack, acme: str):
    until(lambda: "bot" in names(stack, acme))
    assert say(stack, "tiny", acme) != say(stack, "bot", acme)
    asked = ("chat", "bot", "--max-tokens", "8", "--temperature", "0")
    done = loraplex(*asked, stdin="hello\n", data_dir=stack.data_dir, key=acme)
    assert done.stdout == say(stack, "bot", acme) + "\n", done.stderr
    for name in ("keys.json", "serve.json", "pepper"):
        assert stat.S_IMODE((stack.data_dir / name).stat().st_mode) == 0o600


def test_a_quickstart_is_a_tenant_a_key_and_an_adapter(
    stack: Killable, model: Path, tmp_path: Path
):
    make_adapter(model, tmp_path / "helper", b_std=0.5)
    made = json.loads(
        stack.cli("quickstart", "quick", "--adapter", str(tmp_path / "helper"), "--json")
    )
    assert (made["tenant"], made["model"]) == ("quick", "helper")
    assert say(stack, "helper", made["key"])
    again = stack.cli("quickstart", "quick")
    assert "tenant  quick" in again and "model   tiny" in again and made["key"] not in again


def test_a_model_that_is_not_there_is_told_before_anything_starts(tmp_path: Path):
    for name, words in (("nothing", "does not exist"), ("empty", "config.json")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        done = serve(str(tmp_path / name), data_dir=tmp_path / "data")
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
        assert "Postgres" not in done.stderr


def test_a_start_says_how_to_go_on_and_warns_of_nothing(stack: Killable):
    """Of an account that is not root."""
    lines = [line for line in stack.log.splitlines() if "it runs as root" not in line]
    assert not any("warning" in line.lower() for line in lines), lines
    assert any(
        line.strip().startswith("loraplex quickstart NAME") or "/loraplex quickstart" in line
        for line in lines
    )


async def test_an_admin_key_offers_a_key_for_the_chat(stack: Killable, acme: str):
    """Which is revoked when the chat has ended."""
    asked = ("chat", "bot", "hello", "--max-tokens", "8", "--temperature", "0")
    expected = say(stack, "bot", acme)
    assert stack.cli(*asked, "--tenant", "acme") == expected + "\n"
    done = loraplex(*asked, environment=stack.environment)
    assert (done.returncode, "give --tenant NAME" in done.stderr) == (1, True), done.stderr
    async with terminal(*asked, environment=stack.environment) as screen:
        await screen.read_until("Chat as which tenant (acme")
        screen.type("\n")
        assert await screen.wait() == 0
    made = json.loads(stack.cli("key", "list", "--tenant", "acme", "--json"))
    made = [key for key in made if key["name"] == "chat"]
    assert len(made) == 2 and all(key["revoked_at"] for key in made)
    assert made[0]["scopes"] == ["inference"] and made[0]["expires_at"]


@pytest.mark.parametrize("url", ["", "postgresql://nobody@127.0.0.1:9/nothing"])
def test_a_second_serve_of_the_same_is_refused(stack: Stack, acme: str, url: str):
    done = serve("tiny=/nowhere", data_dir=stack.data_dir, database_url=url)
    assert (done.returncode, "another loraplex" in done.stderr) == (2, True), done.stderr
    assert say(stack, "tiny", acme)


def test_a_taken_port_is_told_before_anything_starts(stack: Stack, tmp_path: Path):
    port = stack.url.rpartition(":")[2]
    done = serve("tiny=/nowhere", data_dir=tmp_path, port=port)
    assert done.returncode == 2, done.stderr
    assert f"port {port} of 127.0.0.1 is taken by " in done.stderr
    assert "(pid " in done.stderr and "--port or LORAPLEX_PORT" in done.stderr
    assert "Postgres" not in done.stderr


def test_too_little_memory_is_told_once_with_what_would_do(model: Path, tmp_path: Path):
    with fresh_database(migrated=False) as dsn:
        done = serve(f"tiny={model}", data_dir=tmp_path, database_url=dsn, memory=1)
    words = "memory: 1 bytes are too few for what this worker serves; the least is 65536"
    assert (done.returncode, done.stderr.count(words)) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr


def test_the_gateway_is_told_what_stands_in_a_file(model: Path, tmp_path: Path):
    """A worker over TCP is found, which the gateway refuses unless it is told otherwise."""
    file, port = tmp_path / "loraplex.toml", free_port()
    file.write_text(f"""
        insecure_transport = true
        [models]
        tiny = "{model}"
    """)
    address = f"tcp://127.0.0.1:{port}"
    with fresh_database(migrated=False) as dsn:
        stack = Stack(tmp_path / "data", "--config", str(file), database_url=dsn, **SETTINGS)
        with running(stack):
            options = ("--insecure-transport", "--listen", address, "--advertise", address)
            worker = product(
                *("worker", *options, "--health", f"127.0.0.1:{free_port()}"),
                folder=tmp_path / "w",
                database_url=dsn,
                store=stack.data_dir / "store",
                **SETTINGS,
            )
            asyncio.run(worker.launch())
            try:
                until(lambda: "ready" in of_address(stack, address))
            finally:
                asyncio.run(worker.end())


def of_address(stack: Stack, address: str) -> list[str]:
    """States of the workers there."""
    workers = json.loads(stack.cli("workers", "list", "--json"))
    return [worker["state"] for worker in workers if worker["address"] == address]


def descendants(pid: int) -> dict[int, str]:
    """Command of each process below this one."""
    found: dict[int, str] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
    for each in parents:
        above = each
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and each != pid:
            with contextlib.suppress(OSError):
                found[each] = Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes."""
    found: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def listening() -> set[str]:
    """Inodes of all listening TCP sockets of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def test_no_child_holds_a_listener_that_is_not_its_own(stack: Stack, acme: str):
    """The one that reads uploads, above all: clients would wait in the queue of a listener that
    nobody serves."""
    below, listeners = descendants(stack.pid), listening()
    assert any("admin.uploads.sandbox" in command for command in below.values())
    (gateway,) = [pid for pid, command in below.items() if " gateway " in command]
    assert len(sockets_of(gateway) & listeners) == 2
    holders = {pid for pid in below if sockets_of(pid) & listeners}
    assert holders == {gateway}, {pid: below[pid] for pid in holders}


def test_a_server_that_stops_says_so_and_holds_nobody(
    stack: Stack, acme: str, model: Path, tmp_path: Path
):
    """While one upload is still coming."""
    folder = make_adapter(model, tmp_path, b_std=0.5, seed=3)
    files = [(name, (folder / name).read_bytes()) for name in UPLOADED]
    request = httpx.Request(
        "POST",
        f"{stack.url}/admin/v1/adapters",
        headers={"Authorization": f"Bearer {stack.keys['admin']}"},
        data={"name": "late", "tenant": "acme"},
        files=[(name, (name, data)) for name, data in files],
    )
    body = request.read()
    head = b"POST /admin/v1/adapters HTTP/1.1\r\n"
    for name, value in request.headers.raw:
        head += b"%s: %s\r\n" % (name, value)
    management = json.loads((stack.data_dir / "serve.json").read_text())["management_url"]
    port = int(stack.url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as upload,
        httpx.Client(timeout=60, headers={"connection": "close"}) as client,
    ):
        upload.sendall(head + b"\r\n" + body[:-100])
        until(lambda: client.get(f"{stack.url}/readyz").status_code == 200)
        os.kill(stack.pid, signal.SIGTERM)
        for url in (stack.url, management):
            until(lambda url=url: client.get(f"{url}/readyz").status_code == 503)
            assert client.get(f"{url}/livez").status_code == 200
        for path in ("/v1/models", "/admin/v1/tenants"):
            refused = client.get(f"{stack.url}{path}")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
        upload.sendall(body[-100:])
        assert upload.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
    stack.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{stack.url}/readyz")
    stack.start()


@pytest.mark.parametrize("kind", ["worker", "gateway", "postgres"])
def test_what_crashes_comes_back(stack: Stack, acme: str, kind: str):
    before = say(stack, "bot", acme)
    crashed = children(stack.pid)[kind]
    os.kill(crashed, signal.SIGKILL)
    until(lambda: not is_running(crashed))
    until(lambda: children(stack.pid).keys() == {"worker", "gateway", "postgres"})
    # A connection may have been of the process that crashed.
    until(lambda: answers_ok(stack.url.removeprefix("http://"), "/readyz"))
    assert say(stack, "bot", acme) == before
    with stack.admin as client:
        until(lambda: client.get("/tenants").status_code == 200)


def test_a_stop_and_a_start_keep_everything(stack: Stack, acme: str):
    before, keys = say(stack, "bot", acme), stack.keys
    running = children(stack.pid).values()
    stack.stop()
    assert not any(is_running(pid) for pid in running)
    assert not (stack.data_dir / "serve.json").exists()
    stack.start()
    assert stack.keys == keys
    until(lambda: "bot" in names(stack, acme))
    assert say(stack, "bot", acme) == before


def test_kill_9_takes_all_and_the_next_start_recovers(stack: Killable, acme: str):
    """A start without a model serves those that are registered."""
    before = say(stack, "bot", acme)
    running = children(stack.pid).values()
    stack.kill()
    until(lambda: not any(is_running(pid) for pid in running))
    stack.name_no_model()
    stack.start()
    assert say(stack, "bot", acme) == before


def test_no_module_of_a_folder_that_something_was_started_in_was_imported(stack: Stack, acme: str):
    """By supervisor, importer, Postgres, worker, gateway and sandbox, through all their starts."""
    assert say(stack, "tiny", acme)
    assert list(marks(stack).iterdir()) == []
