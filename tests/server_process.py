"""A process of the product as operators have it: started, ended, held up, killed, started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from loraplex.death import die_with_parent
from loraplex.probe import answers_ok
from tests.preloaded import Forked, preloaded
from tests.stack import ROOT

START_TIMEOUT_S = 180.0


class ServerProcess:
    """One command, and at most one process of it at a time. What it does not say of `log` goes to
    ours."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        health: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        folder: Path = ROOT,
    ) -> None:
        """command: forked of what is imported already if it is `python -m MODULE` of this tree.
        health: HOST:PORT or `unix:PATH` of its /readyz. log: each start adds to it. folder: where
        it starts."""
        self.health = health
        self.log = log
        self._command = command
        self._environment = environment
        self._folder = folder
        self._process: Process | Forked | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Held up or not."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns when it is ready."""
        await self.launch()
        await self.wait_ready()

    async def wait_ready(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await asyncio.to_thread(answers_ok, self.health, "/readyz"):
                assert self.is_running, self.log and self.log.read_text()[-4000:]
                await asyncio.sleep(0.05)

    async def launch(self) -> None:
        assert not self.is_running
        environment = os.environ if self._environment is None else self._environment
        match self._command:
            case [sys.executable, "-m", module, *arguments] if self._folder == ROOT:
                if self.log:
                    # A test may read it before the process has opened it.
                    self.log.touch()
                outputs = [self.log] * 2 if self.log else []
                self._process = preloaded().start(
                    module, *arguments, environment=environment, outputs=outputs
                )
                return
        with ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab")) if self.log else None
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    async def kill(self) -> None:
        """At once, also if a test has failed; nothing if it does not run."""
        if self.is_running:
            self.send(signal.SIGKILL)
            await self.wait()

    async def end(self) -> int:
        """Its exit status, after the SIGTERM of a service manager."""
        self.send(signal.SIGTERM)
        return await self.wait()

    def pause(self) -> None:
        """It lives and does nothing, until `resume`."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()
