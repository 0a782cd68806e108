"""`loraplex serve` as a whole, with a tiny model: from nothing to text, and through every crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.box.postgres import EmbeddedPostgres
from tests.doubles import make_adapter, make_model
from tests.loraplex.box.test_postgres import is_running
from tests.planted import plant
from tests.postgres import fresh_database
from tests.stack import Stack, free_port, running
from tests.terminal import terminal

pytestmark = pytest.mark.full

SETTINGS = {"memory": "64MiB", "threads": 1, "dtype": "float32"}


class Killable(Stack):
    @property
    def environment(self) -> dict[str, str]:
        """Of a command that has no key of its own."""
        return self._environment

    def name_no_model(self) -> None:
        """Starts as `loraplex serve` from now on."""
        self._arguments = ()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None


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


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "loraplex",
            "chat",
            "bot",
            "--max-tokens",
            "8",
            "--temperature",
            "0",
        ],
        env=os.environ | {"LORAPLEX_DATA_DIR": str(stack.data_dir), "LORAPLEX_KEY": acme},
        input="hello\n",
        capture_output=True,
        text=True,
    )
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
        done = subprocess.run(
            [
                *(sys.executable, "-m", "loraplex", "serve", "--port", "0"),
                *("--model", str(tmp_path / name)),
            ],
            env=os.environ | {"LORAPLEX_DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
        )
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
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", *asked],
        env=stack.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "give --tenant NAME" in done.stderr) == (1, True), done.stderr
    async with terminal(*asked, environment=stack.environment) as screen:
        await screen.read_until("Of which tenant (acme")
        screen.type("\n")
        assert await screen.wait() == 0
    made = json.loads(stack.cli("key", "list", "--tenant", "acme", "--json"))
    made = [key for key in made if key["name"] == "chat"]
    assert len(made) == 2 and all(key["revoked_at"] for key in made)
    assert made[0]["scopes"] == ["inference"] and made[0]["expires_at"]


@pytest.mark.parametrize("url", ["", "postgresql://nobody@127.0.0.1:9/nothing"])
def test_a_second_serve_of_the_same_is_refused(stack: Stack, acme: str, url: str):
    places = {"LORAPLEX_DATA_DIR": str(stack.data_dir), "LORAPLEX_DATABASE_URL": url}
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "serve", "--model", "tiny=/nowhere", "--port", "0"],
        env=os.environ | places,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "another loraplex" in done.stderr) == (2, True), done.stderr
    assert say(stack, "tiny", acme)


def test_a_taken_port_is_told_before_anything_starts(stack: Stack, tmp_path: Path):
    port = stack.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "serve", "--model", "tiny=/nowhere", "--port", port],
        env=os.environ | {"LORAPLEX_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert f"port {port} of 127.0.0.1 is taken by " in done.stderr
    assert "(pid " in done.stderr and "--port or LORAPLEX_PORT" in done.stderr
    assert "Postgres" not in done.stderr


def test_too_little_memory_is_told_once_with_what_would_do(model: Path, tmp_path: Path):
    with fresh_database(migrated=False) as dsn:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "loraplex", "serve", "--model", f"tiny={model}"),
                *("--port", "0", "--memory", "1"),
            ],
            env=os.environ | {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_DATABASE_URL": dsn},
            capture_output=True,
            text=True,
            timeout=120,
        )
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
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "loraplex", "worker", "--insecure-transport"),
                    *(
                        "--listen",
                        address,
                        "--advertise",
                        address,
                        "--health",
                        f"127.0.0.1:{free_port()}",
                    ),
                ],
                env=os.environ
                | {
                    **{f"LORAPLEX_{name.upper()}": str(v) for name, v in SETTINGS.items()},
                    "LORAPLEX_DATA_DIR": str(tmp_path / "w"),
                    "LORAPLEX_DATABASE_URL": dsn,
                    "LORAPLEX_STORE": str(stack.data_dir / "store"),
                },
            )
            try:
                until(lambda: "ready" in of_address(stack, address))
            finally:
                worker.terminate()
                worker.wait()


def of_address(stack: Stack, address: str) -> list[str]:
    """States of the workers there."""
    workers = json.loads(stack.cli("workers", "list", "--json"))
    return [worker["state"] for worker in workers if worker["address"] == address]


@pytest.mark.parametrize("kind", ["worker", "gateway", "postgres"])
def test_what_crashes_comes_back(stack: Stack, acme: str, kind: str):
    before = say(stack, "bot", acme)
    crashed = children(stack.pid)[kind]
    os.kill(crashed, signal.SIGKILL)
    until(lambda: not is_running(crashed))
    until(lambda: children(stack.pid).keys() == {"worker", "gateway", "postgres"})
    with httpx.Client(timeout=30) as client:
        until(lambda: client.get(f"{stack.url}/readyz").status_code == 200)
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
