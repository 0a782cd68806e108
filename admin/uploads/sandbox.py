"""Unpacks and validates what strangers sent, in a process that forks a limited one for each upload.

`python -m admin.uploads.sandbox` reads `Task`s and writes `Outcome`s, a JSON line each, until its
input ends: with its parent, however that dies. A fork finds everything imported and
costs milliseconds.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.validator import AdapterFiles, Limits, validate
from adapters.manifest import AdapterManifest, BaseModelShape
from adapters.store.folder import check_free_space
from admin.errors import Invalid, TooLarge
from admin.uploads.archive import ExtractionTarget, extract

MAX_OUTCOME_BYTES = 1 << 20
MAX_OPEN_FILES = 16
NICENESS = 10
"""Tokens that stream go first."""


class Bounds(msgspec.Struct, frozen=True):
    """What one validation may take."""

    memory_bytes: int = 64 << 20
    """Beyond what the interpreter has with everything imported."""
    cpu_s: int = 60
    wall_s: float = 120.0


class Task(msgspec.Struct, frozen=True):
    folder: str
    """Holds the two files, or they are unpacked into it."""
    archive: str | None
    bases: list[BaseModelShape]
    max_rank: int
    max_bytes: int
    """Bound of the unpacked files together."""
    min_free_bytes: int
    """The disk's reserve, which unpacking leaves free."""
    bounds: Bounds


class Validated(msgspec.Struct, frozen=True, tag=True):
    manifest: AdapterManifest


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """An AdapterRejected."""

    code: str
    field: str
    got: Any
    allowed: Any
    hint: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What is no archive that can be read, or a larger one than allowed."""

    is_too_large: bool
    message: str
    code: str
    param: str | None


class DiskFailed(msgspec.Struct, frozen=True, tag=True):
    errno: int | None
    message: str


class Died(msgspec.Struct, frozen=True, tag=True):
    """The validation did not come to its end."""

    why: Literal["memory", "timeout", "crashed"]


Outcome = Validated | Rejected | Refused | DiskFailed | Died
_decoder = msgspec.json.Decoder(Outcome)


def main() -> None:
    os.nice(NICENESS)
    gc.freeze()  # what is here by now is not touched by the forks' collector, and stays shared
    tasks = msgspec.json.Decoder(Task)
    while line := sys.stdin.buffer.readline():
        outcome = _fork(tasks.decode(line))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


def _fork(task: Task) -> Outcome:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _work(task, writer)
    os.close(writer)
    raw = _read(reader, time.monotonic() + task.bounds.wall_s)
    os.close(reader)
    if raw is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if raw is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Died("timeout")
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError:
        return Died("crashed")


def _read(reader: int, deadline: float) -> bytes | None:
    """All until the fork has ended, cut at a bound; None if it has not by the deadline."""
    raw = b""
    while len(raw) < MAX_OUTCOME_BYTES:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        if not (chunk := os.read(reader, 1 << 16)):
            return raw
        raw += chunk
    return None


def _work(task: Task, writer: int) -> NoReturn:
    try:
        _limit(task)
        with open(writer, "wb") as answer:
            answer.write(msgspec.json.encode(_validate(task)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _limit(task: Task) -> None:
    os.close(0)
    os.close(1)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        in_use = pages * resource.getpagesize()
        _set(resource.RLIMIT_AS, in_use + task.bounds.memory_bytes)
    _set(resource.RLIMIT_CPU, task.bounds.cpu_s)
    _set(resource.RLIMIT_FSIZE, task.max_bytes if task.archive else 0)
    _set(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _set(resource.RLIMIT_CORE, 0)


def _set(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # The soft limit on CPU time tells by its signal what happened, the hard one only kills.
    resource.setrlimit(limit, (bound, hard if limit == resource.RLIMIT_CPU else bound))


def _validate(task: Task) -> Outcome:
    folder = Path(task.folder)
    try:
        if task.archive is not None:
            check_room = partial(check_free_space, folder, task.min_free_bytes)
            extract(Path(task.archive), ExtractionTarget(folder, task.max_bytes, check_room))
        limits = Limits(task.max_rank, task.max_bytes)
        return Validated(validate(AdapterFiles.in_folder(folder), task.bases, limits))
    except AdapterRejected as rejected:
        return Rejected(**rejected.to_dict())
    except (Invalid, TooLarge) as refused:
        is_too_large = isinstance(refused, TooLarge)
        return Refused(is_too_large, str(refused), refused.code, refused.param)
    except MemoryError:
        return Died("memory")
    except OSError as error:
        return DiskFailed(error.errno, str(error))


if __name__ == "__main__":
    main()
