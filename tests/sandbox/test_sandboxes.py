"""Sandboxes: what takes too much ends its own task, and nothing else."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest

from sandbox.sandboxes import Sandboxes, SandboxFailed
from sandbox.task import Bounds, Died
from tests.preloaded import ROOT

BOUNDS = Bounds(memory_bytes=64 << 20, cpu_s=0.2, wall_s=20.0, stack_bytes=1 << 20)


@pytest.fixture
def sandboxes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandboxes]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sandboxes = Sandboxes("tests.sandbox.greedy")
    yield sandboxes
    sandboxes.close()
    assert processes() == []


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandboxes]:
    """Those that run tasks without a fork."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sandboxes = Sandboxes("tests.sandbox.greedy", "in_place")
    yield sandboxes
    sandboxes.close()


def processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "tests.sandbox.greedy" in p.cmdline()]


def outcome(sandboxes: Sandboxes, asked: str, bounds: Bounds = BOUNDS) -> str | Died:
    found = sandboxes.task(msgspec.json.encode(asked), bounds).run()
    return found if isinstance(found, Died) else msgspec.json.decode(found, type=str)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("memory", "memory"),
        ("native memory", "memory"),
        ("cpu", "timeout"),
        ("stack", "crashed"),
        ("file", "crashed"),
        ("crash", "crashed"),
        ("error", "crashed"),
    ],
)
def test_what_takes_too_much_ends_alone(sandboxes: Sandboxes, asked: str, why: str) -> None:
    assert outcome(sandboxes, asked) == Died(why)  # type: ignore[arg-type]
    (before,) = processes()
    assert isinstance(outcome(sandboxes, "nothing"), str)
    assert processes() == [before]


@pytest.mark.parametrize(
    ("asked", "why"),
    [("memory", "memory"), ("native memory", "memory"), ("cpu", "timeout"), ("output", "memory")],
)
def test_what_takes_too_much_in_place_is_named(in_place: Sandboxes, asked: str, why: str) -> None:
    assert outcome(in_place, asked) == Died(why)  # type: ignore[arg-type]
    assert outcome(in_place, "nothing") == "nothing"


def test_a_process_in_place_stays(in_place: Sandboxes) -> None:
    """A limit of CPU time is of one task, and a process that crashes is an error of ours."""
    pid = outcome(in_place, "pid")
    for _ in range(100):
        assert outcome(in_place, "pid") == pid
    with pytest.raises(SandboxFailed):
        outcome(in_place, "crash")
    with pytest.raises(SandboxFailed):
        outcome(in_place, "file")
    assert outcome(in_place, "pid") != pid


def test_what_tasks_leave_behind_in_place_is_no_later_tasks(in_place: Sandboxes) -> None:
    """A task has its own limit of memory, whatever earlier tasks keep, and a process that keeps too
    much begins again, with the same socket."""
    pid = outcome(in_place, "pid")
    kept: list[int] = []
    for _ in range(20):
        assert outcome(in_place, "keep") == "keep"
        number = outcome(in_place, "kept")
        assert isinstance(number, str)
        kept.append(int(number))
    assert 4 < max(kept) < 12
    assert kept[-1] < 12
    assert outcome(in_place, "pid") == pid


def test_what_waits_too_long_ends(sandboxes: Sandboxes) -> None:
    bounds = msgspec.structs.replace(BOUNDS, wall_s=0.2)
    assert outcome(sandboxes, "time", bounds) == Died("timeout")


def test_no_socket_and_no_secret_is_inherited(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_KEY_PEPPER", "secret")
    with socket.socket() as listener:
        listener.set_inheritable(True)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert outcome(sandboxes, "nothing") == "nothing"
    (sandbox,) = processes()
    assert sandbox.num_fds() == 3
    assert "secret" not in sandbox.environ().values()


def test_a_sandbox_that_was_killed_is_replaced(sandboxes: Sandboxes) -> None:
    for _ in range(3):
        assert isinstance(outcome(sandboxes, "nothing"), str)
        (sandbox,) = processes()
        sandbox.kill()


def test_a_module_that_cannot_start_is_an_error_of_ours(sandboxes: Sandboxes) -> None:
    absent = Sandboxes("tests.sandbox.absent")
    with pytest.raises(SandboxFailed, match=r"tests\.sandbox\.absent"):
        outcome(absent, "nothing")
    absent.close()


def test_a_process_that_cannot_start_is_an_error_of_ours(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        with pytest.raises(SandboxFailed, match="temporarily unavailable"):
            outcome(sandboxes, "nothing")
    assert outcome(sandboxes, "nothing") == "nothing"


def test_a_stopped_task_ends(sandboxes: Sandboxes) -> None:
    task = sandboxes.task(b'"time"', BOUNDS)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(task.run)
        while not processes():
            pass
        task.stop()
        with pytest.raises(SandboxFailed):
            running.result()
    assert isinstance(outcome(sandboxes, "nothing"), str)


def test_closing_ends_what_runs(sandboxes: Sandboxes) -> None:
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(outcome, sandboxes, "time")
        while not processes():
            pass
        sandboxes.close()
        with pytest.raises(SandboxFailed):
            running.result()
