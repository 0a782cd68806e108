"""Runs tasks in processes with limits.

A sandbox reads `Task`s from standard input and writes an `Answer` for each, as lines of JSON, until
its input ends, which happens when the parent dies. `serve` forks a process for each task. A fork
starts within milliseconds, because it inherits all imported modules. `serve_in_place` needs no
fork, and its work may keep what later tasks need.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from sandbox.task import Answer, Bounds, Died, Done, Task

MAX_OPEN_FILES = 16
MAX_KEPT_BYTES = 128 << 20
"""Maximum bytes of address space that the tasks of one process may leave in use (Linux only)."""

DEATHS: dict[int, Literal["memory", "timeout"]] = {
    signal.SIGPROF: "timeout",
    signal.SIGXCPU: "timeout",
    # Native libraries abort if they cannot allocate memory.
    signal.SIGABRT: "memory",
}
"""Reason to report for a fork that was killed by a signal. Any other signal counts as a crash."""

Work = Callable[[bytes], bytes]
"""Function from the JSON of a task's work to the JSON of the task's outcome."""


def serve(work: Work) -> None:
    """Runs each task in a fork, one at a time, until the input ends."""
    # Keeps existing objects out of a fork's garbage collection, so that the fork continues to share
    # their memory with the parent.
    gc.freeze()
    for task in _tasks():
        _answer(_fork(work, task))


def serve_in_place(work: Work) -> None:
    """Runs each task in this process, one at a time, until the input ends, or a task takes too much
    and the process dies. Limits memory and CPU time; files cannot be written. Starts the program
    again when tasks have left more than MAX_KEPT_BYTES behind."""
    _set(resource.RLIMIT_FSIZE, 0)
    _set(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    own, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = begun = _bytes_in_use()
    for task in _tasks():
        bounds = task.bounds
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (in_use + bounds.memory_bytes, hard))
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
        try:
            outcome = work(bytes(task.work))
        except MemoryError:
            signal.raise_signal(signal.SIGABRT)
            raise
        # The limits are the task's: a process that died later would fail the next task.
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (own, hard))
        is_short = len(outcome) <= bounds.outcome_bytes
        _answer(Done(msgspec.Raw(outcome)) if is_short else Died("memory"))
        in_use = _bytes_in_use()
        if in_use > begun + MAX_KEPT_BYTES:
            # Input and output stay open, so the parent does not notice.
            os.execv(sys.executable, sys.orig_argv)


def _tasks() -> Iterator[Task]:
    decoder = msgspec.json.Decoder(Task)
    while line := sys.stdin.buffer.readline():
        yield decoder.decode(line)


def _answer(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _fork(work: Work, task: Task) -> Answer:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run(work, task, writer)
    os.close(writer)
    raw = _read(reader, time.monotonic() + task.bounds.wall_s, task.bounds.outcome_bytes)
    os.close(reader)
    if raw is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if raw is None:
        return Died("timeout")
    status = os.waitstatus_to_exitcode(status)
    return Done(msgspec.Raw(raw)) if status == 0 else Died(DEATHS.get(-status, "crashed"))


def _read(reader: int, deadline: float, max_bytes: int) -> bytes | None:
    """Returns the bytes that the fork writes until it ends. Returns None if it writes `max_bytes`
    or more, or has not ended by the deadline."""
    raw = b""
    while len(raw) < max_bytes:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        if not (chunk := os.read(reader, 1 << 16)):
            return raw
        raw += chunk
    return None


def _run(work: Work, task: Task, writer: int) -> NoReturn:
    status = 1
    errors = os.fdopen(os.dup(2), "w")
    try:
        # Discards the standard error of native libraries, because a library that aborts prints
        # lines that are not log lines.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _limit(task.bounds)
        with open(writer, "wb") as answer:
            answer.write(work(bytes(task.work)))
        status = 0
    except MemoryError:
        signal.raise_signal(signal.SIGABRT)
    except BaseException:
        traceback.print_exc(file=errors)
        errors.flush()
    finally:
        os._exit(status)


def _limit(bounds: Bounds) -> None:
    os.close(0)
    os.close(1)
    if sys.platform == "linux":
        _set(resource.RLIMIT_AS, _bytes_in_use() + bounds.memory_bytes)
    _set(resource.RLIMIT_STACK, bounds.stack_bytes)
    _set(resource.RLIMIT_FSIZE, bounds.file_bytes)
    _set(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _set(resource.RLIMIT_CORE, 0)
    # The kernel's limit has whole seconds, so a timer enforces fractions of a second. The kernel's
    # limit applies even if the work changes the timer.
    _set(resource.RLIMIT_CPU, math.ceil(bounds.cpu_s))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)


def _bytes_in_use() -> int:
    """Returns the bytes of this process's address space, or 0 where there is no Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _set(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # A process over the soft limit on CPU time gets SIGXCPU, which is reported as a timeout. Over
    # the hard limit it gets SIGKILL, so the hard limit stays higher.
    resource.setrlimit(limit, (bound, hard if limit == resource.RLIMIT_CPU else bound))
