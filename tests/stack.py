"""The product as its users have it: `loraplex serve` in processes of its own, spoken to over
HTTP."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from loraplex.box.postgres import EmbeddedPostgres
from tests.postgres import initialise
from tests.preloaded import ROOT, Forked, preloaded, run

if TYPE_CHECKING:
    from openai import OpenAI

PLAIN = (sys.executable, "-m", "loraplex")
"""The command of this installation."""
START_TIMEOUT_S = 180.0
MAX_QUEUE_WAIT_S = 150.0
"""Ten times what the product is set to: a machine that is slow just then refuses nobody who is not
meant to be refused."""


PORTS = range(10_000, 32_000)
"""Below those that the kernel gives to clients, which could get one before its server binds it."""
_numbers = itertools.count(200 * os.getpid())
"""Counter for the choice of ports. Test processes of the same time begin at different ports."""


def free_port() -> int:
    """Returns a port that nothing uses. Each call returns another one."""
    for number in _numbers:
        port = PORTS[number % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


class Stack:
    """One data directory and the processes that serve it; `start` and `stop` as often as wanted."""

    def __init__(
        self,
        data_dir: Path,
        *arguments: str,
        command: Sequence[str] | None = None,
        cwd: Path = ROOT,
        **settings: object,
    ) -> None:
        """command: of the installation to test, whose processes are started as its users' are; by
        default they are forked from one that has imported all. cwd: where it is started. settings:
        LORAPLEX_* variables, without the prefix and in lower case."""
        self.data_dir = data_dir
        self._command = command
        self._cwd = cwd
        self.url = f"http://127.0.0.1:{free_port()}"
        self._arguments = arguments
        self._has_database = "database_url" in settings
        """An external one."""
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")},
            "LORAPLEX_DATA_DIR": str(data_dir),
            "LORAPLEX_PORT": self.url.rpartition(":")[2],
            "LORAPLEX_MANAGEMENT_PORT": "0",
            "LORAPLEX_URL": self.url,
            "LORAPLEX_MAX_QUEUE_WAIT": str(MAX_QUEUE_WAIT_S),
            **{f"LORAPLEX_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def log(self) -> str:
        path = self.data_dir / "serve.log"
        return path.read_text() if path.exists() else ""

    def start(self) -> None:
        """Returns when /readyz says so."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._process = self._launch(self.data_dir / "serve.log")
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert not self._has_ended, self.log[-4000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz").status_code == 200 and self.keys:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {START_TIMEOUT_S} s: {self.log[-4000:]}")

    def stop(self) -> None:
        """SIGTERM, as a service manager would."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)
            assert self._wait(60) == 0, self.log[-4000:]
            self._process = None

    def _launch(self, log: Path) -> subprocess.Popen[bytes] | Forked:
        if self._command is None:
            postgres = EmbeddedPostgres(self.data_dir)
            if not self._has_database and not postgres.cluster.exists():
                initialise(postgres, self.data_dir)
            return preloaded().start(
                "tests.forked_box",
                *("serve", *self._arguments),
                environment=self._environment,
                outputs=[log, log],
                folder=self._cwd,
            )
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._command, "serve", *self._arguments],
                cwd=self._cwd,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """SIGKILL; its children end with it."""
        os.kill(self.pid, signal.SIGKILL)
        self._wait(60)
        self._process = None

    @property
    def _has_ended(self) -> bool:
        assert self._process is not None
        if isinstance(self._process, Forked):
            return self._process.ended.done()
        return self._process.poll() is not None

    def _wait(self, timeout_s: float) -> int:
        assert self._process is not None
        if isinstance(self._process, Forked):
            return self._process.ended.result(timeout_s)
        return self._process.wait(timeout_s)

    @property
    def bin(self) -> Path:
        """Of the installation, with its `loraplex` and its Python."""
        assert self._command is not None
        return Path(self._command[0]).parent

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def keys(self) -> dict[str, Any]:
        path = self.data_dir / "keys.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def cli(self, *arguments: str, key: str | None = None, stdin: str = "") -> str:
        """The command's standard output; its key is the admin's unless given."""
        environment = {**self._environment, "LORAPLEX_KEY": key or self.keys["admin"]}
        if self._command is None and not stdin:
            done = run("loraplex", *arguments, environment=environment, folder=self._cwd)
            assert done.status == 0, f"{arguments}: {done.stdout}{done.stderr}"
            return done.stdout
        ended = subprocess.run(
            [*(self._command or PLAIN), *arguments],
            cwd=self._cwd,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, f"{arguments}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    @property
    def admin(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"{self.url}/admin/v1",
            headers={"Authorization": f"Bearer {self.keys['admin']}"},
            timeout=60,
        )

    def create_tenant(self, name: str) -> str:
        """A tenant and its key."""
        with self.admin as admin:
            admin.post("/tenants", json={"name": name}).raise_for_status()
            answer = admin.post(f"/tenants/{name}/keys", json={"name": "test"})
            answer.raise_for_status()
            return answer.json()["key"]

    def push(self, folder: Path, name: str, tenant: str, **fields: str) -> dict[str, Any]:
        """Uploads what peft saved in `folder`; returns the version when it is served."""
        with self.admin as admin:
            files = [
                (part, (part, (folder / part).read_bytes()))
                for part in ("adapter_config.json", "adapter_model.safetensors")
            ]
            fields |= {"name": name, "tenant": tenant}
            answer = admin.post("/adapters", data=fields, files=files)
            assert answer.status_code in (200, 201), answer.text
            path = f"/adapters/{name}/versions/{answer.json()['version']}"
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (made := admin.get(path, params={"tenant": tenant}).json())["served"]:
                assert made["state"] in ("proving", "ready"), made
                assert time.monotonic() < deadline, made
                time.sleep(0.1)
            return made

    def openai(self, key: str, **options: Any) -> OpenAI:
        # Slow to import, and processes of tests that are not clients import this file too.
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        # As root the cluster lies outside of the data directory; what leads to it and its keys go
        # with it.
        shutil.rmtree(EmbeddedPostgres(stack.data_dir).home, ignore_errors=True)
        for name in ("pg", "keys.json"):
            (stack.data_dir / name).unlink(missing_ok=True)
