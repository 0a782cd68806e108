"""Supervises child processes: starts, reads, restarts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from loraplex.death import die_with_parent
from loraplex.errors import BadSettings, ChildFailed
from loraplex.settings import SECRETS

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 5.0
CHILD_FOLDER = "/"
"""Working folder of every child process. Only root can create files in it, so no other account can
supply a file that a library reads by a relative name."""
STABLE_S = 10.0
"""Seconds of uptime after which a crash no longer increases the backoff."""


class Child:
    """Child process that its supervisor restarts whenever it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        tell: Callable[[str], None],
        relay: Callable[[str, str], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`relay` gets the process's name and each line of its output. Without it, the process
        writes to this process's output."""
        self.name = name
        self.num_starts = 0
        self._command = command
        self._environment = environment
        self._tell = tell
        self._relay = relay
        self._pass_fds = pass_fds
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[int] | None = None
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._is_refused = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process and keeps it running."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def wait_ready(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits until the process is ready. Raises ChildFailed if it crashes or is not ready in
        time, and BadSettings if it refuses its settings."""
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(is_ready):
            if self._is_refused:
                raise BadSettings(f"the {self.name} does not start with these settings")
            if self.num_starts > 1 or time.monotonic() > deadline:
                raise ChildFailed(f"the {self.name} did not start; its output is above")
            await asyncio.sleep(0.05)
        self._was_ready = True

    async def stop(self, timeout_s: float) -> None:
        """Sends SIGTERM to drain the process, then SIGKILL if it runs after `timeout_s` seconds."""
        self._stopping.set()
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                self._tell(f"{self.name}: killed, because it did not end within {timeout_s:g} s")
                self.kill()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def kill(self) -> None:
        self._stopping.set()
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.kill()

    async def _spawn(self) -> None:
        output = None if self._relay is None else asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output and asyncio.subprocess.STDOUT,
            env=self._environment,
            cwd=CHILD_FOLDER,
            pass_fds=self._pass_fds,
            # Ctrl-C must reach only the supervisor, which ends its children in order.
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        self.num_starts += 1
        if self._stopping.is_set():
            # The supervisor was told to stop while the process was being started.
            self._process.send_signal(signal.SIGTERM)

    async def _keep(self) -> int:
        """Restarts the process whenever it ends, until the supervisor stops it or `_is_final`
        returns True. Returns the last exit code, or 0 if the supervisor stopped it in the pause
        before a restart."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            started = time.monotonic()
            code = await self._read_to_end()
            lived_s = time.monotonic() - started
            if self._stopping.is_set() or self._is_final(code, lived_s):
                return code
            if lived_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            why = f"with exit status {code}" if code >= 0 else f"by signal {-code}"
            self._tell(f"{self.name}: ended {why}; starting again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
                    return 0
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            await self._spawn()

    def _is_final(self, code: int, lived_s: float) -> bool:
        """Returns whether a process that ended by itself is not restarted. `code` is its exit code,
        and `lived_s` is the number of seconds for which it ran."""
        self._is_refused = code == BadSettings.exit_code and not self._was_ready
        return self._is_refused

    async def _read_to_end(self) -> int:
        process = self._process
        assert process is not None
        if process.stdout is not None and self._relay is not None:
            async for line in _lines(process.stdout):
                self._relay(self.name, line)
        return await process.wait()


async def _lines(stream: asyncio.StreamReader):
    """Yields lines as text. Skips lines that are too long."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


def python(*arguments: str) -> list[str]:
    """Returns a command that runs this Python interpreter with `arguments`. The interpreter imports
    nothing from its working folder."""
    return [sys.executable, "-P", *arguments]


def environment_of_child() -> dict[str, str]:
    """Returns this process's environment without secrets. Children get only the secrets that they
    need."""
    hidden = {f"LORAPLEX_{name.upper()}{end}" for name in SECRETS for end in ("", "_FILE")}
    return {name: value for name, value in os.environ.items() if name not in hidden}
