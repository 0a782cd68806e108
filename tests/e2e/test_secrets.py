"""Canaries for each secret and for what is said, through the whole product: afterwards they are in
no log, file, table, process listing or refusal but where they belong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from loraplex.box.postgres import EmbeddedPostgres
from loraplex.private import socket_folder
from store.records import new_key
from tests.buckets import BUCKET, s3_server
from tests.doubles import write_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.stack import PLAIN, ROOT, Stack, running

pytestmark = pytest.mark.full

TABLES = "SELECT oid::regclass AS name FROM pg_class WHERE relkind IN ('r', 'p') AND oid >= 16384"


class Canaries:
    """What must not be found, by name."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}

    def add(self, name: str, secret: str | None = None) -> str:
        """Makes one, unless it is there already."""
        self.secrets[name] = secret or f"canary{secrets.token_hex(16)}"
        return self.secrets[name]

    def found_in(self, data: bytes | str) -> set[str]:
        data = data.encode() if isinstance(data, str) else data
        return {name for name, secret in self.secrets.items() if secret.encode() in data}


class Plane:
    """A running stack and all it says to those who ask."""

    def __init__(self, stack: Stack, canaries: Canaries, adapter: Path) -> None:
        self.stack = stack
        self.canaries = canaries
        self.postgres = EmbeddedPostgres(stack.data_dir)
        self.refusals: list[str] = []
        self.printed: list[str] = []
        """By commands that show no key."""
        self.key = ""
        self._adapter = adapter

    def ask_everything(self) -> None:
        self.key = self.canaries.add("tenant key", self.stack.create_tenant("acme"))
        self._make_keys()
        self._make_adapter()
        self._infer()
        self._infer_badly()
        self._administer_badly()
        self._command()

    def _make_keys(self) -> None:
        with self.stack.admin as admin:
            headers = {"idempotency-key": "once"}
            for name in ("key made twice", "key made twice"):
                answer = admin.post("/tenants/acme/keys", json={}, headers=headers)
                made = self.canaries.add(name, answer.json()["key"])
            answer = admin.post(f"/keys/{made.split('_')[1]}/rotate", json={})
            self.canaries.add("rotated key", answer.json()["key"])
            expired = {"name": "expired", "expires_at": "2026-01-01T00:00:00Z"}
            self._refused(admin.post("/tenants/acme/keys", json=expired | {"scopes": ["none"]}))
        printed = self.stack.cli("key", "create", "--tenant", "acme", "--json")
        self.canaries.add("key of the command line", json.loads(printed)["key"])

    def _make_adapter(self) -> None:
        self.stack.push(self._adapter, "bot", "acme")
        with self.stack.admin as admin:
            self._refused(
                admin.post(
                    "/adapters",
                    data={"name": "bad", "tenant": "acme"},
                    files={
                        "adapter_config.json": ("adapter_config.json", b"{}"),
                        "adapter_model.safetensors": ("adapter_model.safetensors", b"12345678"),
                    },
                )
            )

    def _infer(self) -> None:
        said = self.canaries.secrets["prompt"]
        with self.stack.openai(self.key, timeout=60) as client:
            for model in (NAME, "bot"):
                client.completions.create(model=model, prompt=said, max_tokens=2)
                messages: Any = [{"role": "user", "content": said}]
                chat = client.chat.completions.create(
                    model=model, messages=messages, max_tokens=2, stream=True
                )
                list(chat)
        with self._client(self.key) as client:
            client.post("/tokenize", json={"model": NAME, "prompt": said}).raise_for_status()

    def _infer_badly(self) -> None:
        said, key = self.canaries.secrets["prompt"], self.key
        good = {"model": NAME, "prompt": said, "max_tokens": 2}
        bodies: list[Any] = [
            good | {"model": "nothing"},
            good | {"max_tokens": -2},
            good | {"max_tokens": said},
            good | {"prompt": {said: said}},
            good | {"prompt": said * 1000},
            good | {"logit_bias": {"5": said}},
            good | {"stop": [said] * 100},
            [said],
        ]
        with self._client(key) as client:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                for body in bodies:
                    self._refused(client.post(path, json=body))
                self._refused(client.post(path, content=f'{{"prompt": "{said}'))
            self._refused(client.get(f"/v1/nothing?key={key}"))
        bad = self.canaries.add("key that nobody has", new_key().text)
        wrong = self.canaries.add("key with a wrong checksum", bad[:-1] + "!")
        for authorization in (f"Bearer {bad}", f"Bearer {wrong}", f"Basic {key}", key):
            headers = {"authorization": authorization}
            for path in ("/v1/models", "/admin/v1/tenants", "/v1/organization/usage/completions"):
                self._refused(httpx.get(f"{self.stack.url}{path}", headers=headers))
        with self._client(self.stack.keys["admin"]) as client:
            self._refused(client.post("/v1/completions", json=good))

    def _administer_badly(self) -> None:
        secret = self.canaries.secrets["prompt"]
        with self.stack.admin as admin:
            for body in (
                {"name": 1},
                {"name": "x", "other": secret},
                {},
                [secret],
                {"name": "acme"},
            ):
                self._refused(admin.post("/tenants", json=body))
            self._refused(admin.post("/tenants", content=f'{{"name": "{secret}'))
            self._refused(admin.get("/keys/nothing"))
        with self._client(self.key) as client:
            self._refused(client.get("/admin/v1/tenants"))

    def _command(self) -> None:
        for command in (
            ("tenant", "list", "--json"),
            ("tenant", "show", "acme", "--json"),
            ("key", "list", "--tenant", "acme", "--json"),
            ("key", "list", "--json"),
            ("audit", "list", "--json"),
            ("audit", "verify"),
            ("adapter", "list", "--tenant", "acme", "--json"),
            ("adapter", "show", "bot", "--tenant", "acme", "--json"),
            ("model", "list", "--json"),
            ("quota", "show", "--tenant", "acme", "--json"),
            ("price", "list", "--json"),
            ("usage", "--json"),
            ("config",),
        ):
            self.printed.append(self.stack.cli(*command))

    def _refused(self, answer: httpx.Response) -> None:
        assert 400 <= answer.status_code < 500, answer.text
        self.refusals.append(answer.text + str(answer.headers))

    def _client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.stack.url, headers=headers, timeout=60)

    def crash(self) -> None:
        """Postgres, the worker and the gateway die with requests on their way."""
        for name in ("bin/postgres", "worker_process", "loraplex gateway"):
            (pid,) = [pid for pid in self.processes if name in _command_line(pid)][:1]
            os.kill(pid, signal.SIGKILL)
            said = self.canaries.secrets["prompt"]
            deadline = time.monotonic() + 120
            while True:
                with (
                    contextlib.suppress(httpx.TransportError),
                    self._client(self.key) as client,
                    self.stack.admin as admin,
                ):
                    answers = [
                        client.post("/v1/completions", json={"model": "bot", "prompt": said}),
                        admin.get("/tenants"),
                    ]
                    if all(answer.status_code == 200 for answer in answers):
                        break
                    self.refusals += [a.text for a in answers if a.status_code != 200]
                assert time.monotonic() < deadline, self.stack.log[-2000:]
                time.sleep(0.1)

    @property
    def processes(self) -> list[int]:
        """The stack's, its children before theirs. Some may have ended meanwhile."""
        found = [self.stack.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def metrics(self) -> str:
        socket = socket_folder(self.stack.data_dir, "worker-health.sock") / "worker-health.sock"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
            return client.get("http://worker/metrics").raise_for_status().text

    def tables(self) -> dict[str, str]:
        """The rows of each table as text."""

        async def dump() -> dict[str, str]:
            connection = await asyncpg.connect(self.postgres.dsn())
            try:
                names = [row["name"] for row in await connection.fetch(TABLES)]
                return {
                    name: str(await connection.fetch(f"SELECT t::text FROM {name} t"))
                    for name in names
                }
            finally:
                await connection.close()

        return asyncio.run(dump())

    def files(self) -> Iterator[Path]:
        """All that the stack keeps: logs, spool, store, caches, the database's own."""
        for folder in {self.stack.data_dir, self.postgres.home}:
            yield from (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())

    def where_it_belongs(self, path: Path) -> set[str]:
        """The canaries that may be in a file."""
        if path == self.stack.data_dir / "keys.json":
            return {"admin key"}
        if path == self.postgres.home / "password":
            return {"database password"}
        return set()


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@pytest.mark.timeout(600)
def test_secrets_stay_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canaries = Canaries()
    canaries.add("prompt")
    tiny = Tiny(tmp_path)
    adapter = write_adapter(tiny.shape, tmp_path / "adapter", rank=4, seed=1)
    with s3_server() as environment:
        environment["AWS_SECRET_ACCESS_KEY"] = canaries.add("secret of the store")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        stack = tiny.stack(
            command=PLAIN,  # its command lines and environments are looked at
            store=f"s3://{BUCKET}/prefix",
            key_pepper=canaries.add("pepper"),
            log_format="json",
        )
        with running(stack):
            plane = Plane(stack, canaries, adapter)
            canaries.add("admin key", stack.keys["admin"])
            canaries.add("database password", plane.postgres.password)
            plane.ask_everything()
            plane.crash()
            for pid in plane.processes:
                assert canaries.found_in(_command_line(pid)) == set()
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    limits = Path(f"/proc/{pid}/limits").read_text()
                    assert "Max core file size        0 " in limits, "a core would hold them all"
            assert canaries.found_in(plane.metrics()) == set()
            for table, rows in plane.tables().items():
                assert canaries.found_in(rows) == set(), table
        for text in (*plane.refusals, *plane.printed):
            assert canaries.found_in(text) == set(), text
        # Kept until here: the stack's own end may write too.
        for path in plane.files():
            allowed = plane.where_it_belongs(path)
            assert canaries.found_in(path.read_bytes()) <= allowed, path
            if allowed:
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        # As JSON a log says all that it says as text, and more.
        told = [json.loads(line) for line in stack.log.splitlines()]
        assert {"gateway.dispatch.settlement", "workers.process.server", "loraplex"} <= {
            each["logger"] for each in told
        }, "nothing was logged"
        assert any(each.get("request_id") for each in told)


BROKEN: dict[str, Callable[[str], str]] = {
    "nobody listens": lambda secret: f"postgresql://u:{secret}@127.0.0.1:1/db",
    "no such socket": lambda secret: f"postgresql://u:{secret}@/db?host=/nothing",
    "an unescaped slash": lambda secret: f"postgresql://u:{secret}/x@127.0.0.1/db",
    "an unescaped bracket": lambda secret: f"postgresql://u:[{secret}@127.0.0.1/db",
    "another scheme": lambda secret: f"mysql://u:{secret}@127.0.0.1/db",
    "an unknown option": lambda secret: f"postgresql://u:{secret}@127.0.0.1:1/db?sslmode=odd",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_database_url_is_not_quoted(tmp_path: Path, kind: str) -> None:
    secret = f"canary{secrets.token_hex(16)}"
    environment = {name: v for name, v in os.environ.items() if not name.startswith("LORAPLEX_")}
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "migrate"],
        env=environment
        | {"LORAPLEX_DATABASE_URL": BROKEN[kind](secret), "LORAPLEX_DATA_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "database" in done.stderr
    assert secret not in done.stdout + done.stderr
