"""The product as its users have it: `loraplex serve` in processes of its own, spoken to over
HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from loraplex.box.postgres import EmbeddedPostgres
from tests.plane import START_TIMEOUT_S, Plane, free_port, variables
from tests.postgres import initialise
from tests.preloaded import ROOT, run

if TYPE_CHECKING:
    from openai import OpenAI

PLAIN = (sys.executable, "-m", "loraplex")
"""The command of this installation."""
MAX_QUEUE_WAIT_S = 150.0
"""Ten times what the product is set to: a machine that is slow just then refuses nobody who is not
meant to be refused."""


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
        self._has_database = "database_url" in settings
        """An external one."""
        port = free_port()
        self._plane = Plane(
            ("tests.forking", "serve", *arguments)
            if command is None
            else (*command, "serve", *arguments),
            kind="forked" if command is None else "process",
            port=port,
            environment={
                **{k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")},
                **variables(
                    data_dir=data_dir,
                    port=port,
                    management_port=0,
                    url=f"http://127.0.0.1:{port}",
                    max_queue_wait=MAX_QUEUE_WAIT_S,
                ),
                **variables(**settings),
            },
            log=data_dir / "serve.log",
            folder=cwd,
        )
        self.url = self._plane.url
        self._is_started = False

    @property
    def log(self) -> str:
        return self._plane.log_text

    def start(self) -> None:
        """Returns when /readyz says so."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._command is None and not self._has_database:
            postgres = EmbeddedPostgres(self.data_dir)
            if not postgres.cluster.exists():
                initialise(postgres, self.data_dir)
        self._is_started = True
        asyncio.run(self._plane.start())
        while not self.keys:
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it as a service manager does, if it was started and not killed."""
        if self._is_started:
            self._is_started = False
            assert asyncio.run(self._plane.end()) == 0, self.log[-4000:]

    def kill(self) -> None:
        """Kills it; its children end with it."""
        self._is_started = False
        asyncio.run(self._plane.kill())

    @property
    def bin(self) -> Path:
        """Of the installation, with its `loraplex` and its Python."""
        assert self._command is not None
        return Path(self._command[0]).parent

    @property
    def pid(self) -> int:
        return self._plane.pid

    @property
    def keys(self) -> dict[str, Any]:
        path = self.data_dir / "keys.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def cli(self, *arguments: str, key: str | None = None, stdin: str = "") -> str:
        """The command's standard output; its key is the admin's unless given."""
        environment = {**self._plane.environment, "LORAPLEX_KEY": key or self.keys["admin"]}
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
