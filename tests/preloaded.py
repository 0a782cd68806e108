"""Processes of the product forked from one that has imported all of it.

A worker needs three seconds of CPU to import torch, a gateway one, and the suite starts hundreds. A
forked process runs the same module as `python -m MODULE` would, in its own environment and folder
and with outputs of its own, and ends, is killed and is waited for as any other.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from loraplex.death import die_with_parent

ROOT = Path(__file__).parents[1]
MODULES = ("loraplex.cli", "loraplex.roles.planes", "loraplex.roles.worker_process")
MAX_MESSAGE_BYTES = 1 << 18
START_TIMEOUT_S = 240.0


class Start(msgspec.Struct):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    outputs: list[str]
    """Paths of standard output and of standard error, to which each start adds; none: it writes
    where this process does."""


class Started(msgspec.Struct, tag=True):
    pid: int


class Ended(msgspec.Struct, tag=True):
    pid: int
    status: int
    """As `subprocess` has it: of its exit, or the signal as a negative number."""


class Forked:
    """One that was started, with what an asyncio process has."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: Future[int] = Future()
        # No wait that is cancelled cancels it.
        self.ended.set_running_or_notify_cancel()

    @property
    def returncode(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        return await asyncio.wrap_future(self.ended)

    def end(self, status: int) -> None:
        self.ended.set_result(status)


class Preloaded:
    """The process that has imported all, and what it says of those that it was asked to start."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._started: Future[Forked] = Future()
        self._forked: dict[int, Forked] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._close)

    def start(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        outputs: Sequence[Path] = (),
        folder: Path = ROOT,
    ) -> Forked:
        """outputs: as of `Start`. folder: where it starts."""
        paths = [str(path) for path in outputs]
        start = Start(module, [*arguments], dict(environment), str(folder), paths)
        with self._lock:
            self._started = Future()
            self._socket.send(msgspec.msgpack.encode(start))
            # The first start waits for the imports.
            return self._started.result(START_TIMEOUT_S)

    def _listen(self) -> None:
        while message := self._socket.recv(MAX_MESSAGE_BYTES):
            match msgspec.msgpack.decode(message, type=Started | Ended):
                case Started(pid):
                    self._forked[pid] = Forked(pid)
                    self._started.set_result(self._forked[pid])
                case Ended(pid, status):
                    self._forked.pop(pid).end(status)

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run(module: str, *arguments: str, environment: Mapping[str, str], folder: Path = ROOT) -> Done:
    """`python -m MODULE` to its end, begun in that folder."""
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [Path(temporary, name) for name in ("out", "err")]
        forked = preloaded().start(
            module, *arguments, environment=environment, outputs=outputs, folder=folder
        )
        return Done(forked.ended.result(), *(path.read_text() for path in outputs))


@cache
def preloaded() -> Preloaded:
    """That of this test process; it ends with it, and ends those that it has started."""
    return Preloaded()


def serve(ours: socket.socket) -> Start | None:
    """Starts what it is asked to, and says how each ends, until nothing can be asked any more; None
    then. In a process that it started: what that is to run."""
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    die_with_us = die_with_parent(signal.SIGKILL)
    wakes, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with ours, wakes, wakeup, selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wakes in ready:
                wakes.recv(4096)
                reap(ours)
            if ours in ready:
                if not (message := ours.recv(MAX_MESSAGE_BYTES)):
                    return None
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    if die_with_us is not None:
                        die_with_us()
                    return msgspec.msgpack.decode(message, type=Start)
                ours.send(msgspec.msgpack.encode(Started(pid)))


def reap(ours: socket.socket) -> None:
    """Says how each that has ended since ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        ended = Ended(pid, os.waitstatus_to_exitcode(status))
        ours.send(msgspec.msgpack.encode(ended))


def become(start: Start) -> NoReturn:
    """As `python -m` would, but that no module is taken apart at the end: that takes longer than
    most commands, and would first copy the memory that is shared."""
    status = 0
    try:
        for descriptor, path in enumerate(start.outputs, 1):
            opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environment)
        sys.argv = [start.module, *start.arguments]
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert ended.code is None or isinstance(ended.code, int)
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        become(asked)
