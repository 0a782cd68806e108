"""Runs tasks in sandboxes, which are started when tasks need them and replaced when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from threading import Lock

import msgspec

from sandbox.server import DEATHS
from sandbox.task import Answer, Bounds, Died, Done, Task

GRACE_S = 10.0
"""Seconds after a task's time limit at which the task's sandbox is considered dead."""
END_S = 1.0
"""Seconds in which a process that has closed its output ends."""
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Environment variables that a sandbox inherits. Others are withheld, as they may be secret."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class SandboxFailed(Exception):
    """Failure to get an answer, because two sandboxes died, all sandboxes are closed, or the task
    was stopped."""


class Sandboxes:
    """Pool of sandboxes that run the same module. Has one sandbox for each task that runs at the
    same time. Thread-safe."""

    def __init__(self, module: str, *arguments: str) -> None:
        """module: name of a module that calls `serve` or `serve_in_place` of `sandbox.server` when
        it is run."""
        # With -P, Python imports nothing from the working folder.
        self.command = (sys.executable, "-P", "-m", module, *arguments)
        self._idle: list[_Sandbox] = []
        self._busy: set[_Sandbox] = set()
        self._lock = Lock()
        self._is_closed = False

    def task(self, work: bytes, bounds: Bounds) -> SandboxTask:
        """Returns a task that has not started. work: JSON that describes the work."""
        return SandboxTask(self, Task(bounds, msgspec.Raw(work)))

    def acquire(self) -> _Sandbox:
        """Returns an idle sandbox, or starts one. Raises SandboxFailed."""
        with self._lock:
            if self._is_closed:
                raise SandboxFailed("the sandboxes are closed")
            try:
                sandbox = self._idle.pop() if self._idle else _Sandbox(self.command)
            except OSError as error:
                raise SandboxFailed(f"no sandbox can be started: {error}") from error
            self._busy.add(sandbox)
        return sandbox

    def release(self, sandbox: _Sandbox, *, is_alive: bool) -> None:
        """Takes back a sandbox whose task has ended. Closes the sandbox unless it is alive."""
        with self._lock:
            self._busy.remove(sandbox)
            if is_alive and not self._is_closed:
                self._idle.append(sandbox)
                return
        sandbox.close()

    def close(self) -> None:
        """Ends all sandboxes, including busy ones."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
            for sandbox in self._busy:
                sandbox.kill()
        for sandbox in idle:
            sandbox.close()


class SandboxTask:
    """Work for a sandbox. One thread runs it, and another may stop it."""

    def __init__(self, sandboxes: Sandboxes, task: Task) -> None:
        self._sandboxes = sandboxes
        self._task = task
        self._lock = Lock()
        self._sandbox: _Sandbox | None = None
        self._is_stopped = False

    def run(self) -> bytes | Died:
        """Runs the task. Returns the JSON of its outcome, or `Died` if the process that worked on
        the task was killed or crashed. Uses a second sandbox if the first dies, for example because
        it was killed while idle. Raises SandboxFailed if the second dies too, or the task was
        stopped."""
        for _ in range(2):
            with self._lock:
                if self._is_stopped:
                    break
                sandbox = self._sandbox = self._sandboxes.acquire()
            answer = sandbox.run(self._task)
            with self._lock:
                self._sandbox = None
            self._sandboxes.release(sandbox, is_alive=answer is not None and sandbox.is_alive)
            if answer is not None:
                return bytes(answer.outcome) if isinstance(answer, Done) else answer
        raise SandboxFailed(f"no sandbox answered: {' '.join(self._sandboxes.command)}")

    def stop(self) -> None:
        """Kills the sandbox that works on the task, so that `run` ends."""
        with self._lock:
            self._is_stopped = True
            if self._sandbox is not None:
                self._sandbox.kill()


class _Sandbox:
    """Process that runs `sandbox.server.serve`."""

    def __init__(self, command: tuple[str, ...]) -> None:
        inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack, theirs:
            stack.callback(self._socket.close)
            self._process = subprocess.Popen(
                command,
                cwd="/",
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=inherited | ONE_THREAD,
                # The sandbox gets its own process group, so that `kill` also ends its forks.
                start_new_session=True,
            )
            stack.pop_all()

    def run(self, task: Task) -> Answer | None:
        """Runs a task and returns the answer, or None if the sandbox did not answer, or died of
        something else than its limits."""
        deadline = time.monotonic() + task.bounds.wall_s + GRACE_S
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._socket.settimeout(task.bounds.wall_s + GRACE_S)
            self._socket.sendall(msgspec.json.encode(task) + b"\n")
            line = self._read_line(deadline, 2 * task.bounds.outcome_bytes)
            return msgspec.json.decode(line, type=Answer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if reason := DEATHS.get(-self._process.wait(END_S)):
                return Died(reason)
        return None

    def _read_line(self, deadline: float, max_bytes: int) -> bytes:
        """Reads a line. Returns less than a line if the sandbox ends first. Raises TimeoutError if
        the line is incomplete at the deadline."""
        line = bytearray()
        while not line.endswith(b"\n") and len(line) < max_bytes:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                break
            line += chunk
        return bytes(line)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills the process. May be called while another thread runs a task."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._socket.close()
