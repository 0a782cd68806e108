"""Kernel threads follow what other processes leave of the cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ops.cpu import CpuOps
from ops.processor import quota_cores
from ops.registry import select
from ops.scheduler_times import SchedulerTimes
from ops.thread_count import WINDOW_S, ThreadCount
from tests.ops.conftest import VARIANTS, backend

STEP_S = 0.125
"""Seconds of a step, each of which is a window."""
assert STEP_S >= WINDOW_S


class Machine:
    """Scheduler times that a test sets. delay: of each window, as a share of its computing."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.free: float | None = None
        self._delayed = 0.0
        self._now = 0.0

    def run_delay(self, thread_ids: Sequence[int]) -> float:
        assert len(thread_ids) > 1
        self._delayed += self.delay * STEP_S
        return self._delayed

    def free_cores(self) -> float | None:
        return self.free

    def run(self, count: ThreadCount, number: int, pause: float = 0.0) -> list[int]:
        """Records steps of a window's computing, each after a pause. Returns what each gave."""
        given: list[int] = []
        for _ in range(number):
            begin = self._now + pause
            self._now = begin + STEP_S
            given.append(count.record_step(begin, self._now))
        return given


def make_count(limit: int) -> tuple[ThreadCount, Machine]:
    machine = Machine()
    return ThreadCount(limit, machine, lambda count: list(range(1, count + 1))), machine


@pytest.mark.parametrize(
    ("limit", "delay", "expected"),
    [
        pytest.param(2, 0.7, 1, id="a busy process on two cores"),
        pytest.param(2, 0.1, 2, id="a gateway beside the worker"),
        pytest.param(16, 0.7, 15, id="a busy process on sixteen cores"),
        pytest.param(16, 4.2, 12, id="four of them"),
        pytest.param(2, 30.0, 1, id="very many"),
        pytest.param(1, 0.9, 1, id="one core"),
    ],
)
def test_threads_that_wait_for_cores_are_given_up(limit, delay, expected) -> None:
    count, machine = make_count(limit)
    machine.delay = delay
    assert machine.run(count, 2) == [limit, expected]


def test_delays_that_are_short_beside_the_pauses_between_steps_change_nothing() -> None:
    count, machine = make_count(2)
    machine.delay = 0.5
    assert machine.run(count, 5, pause=4 * STEP_S) == [2] * 5


def test_cores_that_others_leave_free_are_taken_back() -> None:
    count, machine = make_count(4)
    machine.delay, machine.free = 2.0, 2.1
    assert machine.run(count, 2)[-1] == 2
    machine.delay = 0.0
    assert machine.run(count, 3)[-1] == 2  # others still use what was given up
    machine.free = 2.9
    assert machine.run(count, 1)[-1] == 3
    machine.free = 64.0
    assert machine.run(count, 2)[-1] == 4


def test_nothing_changes_where_nothing_is_known(tmp_path: Path) -> None:
    times = SchedulerTimes(tmp_path)
    count = ThreadCount(8, times, lambda count: list(range(1, count + 1)))
    assert Machine().run(count, 5) == [8] * 5
    assert times.free_cores() is None


def test_times_are_read_from_linux(tmp_path: Path) -> None:
    (tmp_path / "self/task/7").mkdir(parents=True)
    (tmp_path / "self/task/7/schedstat").write_text("614094061 1451481619 743\n")
    times = SchedulerTimes(tmp_path)
    assert times.run_delay([7, 8]) == pytest.approx(1.451481619)
    cores = sorted(os.sched_getaffinity(0))

    def write_stat(busy: int) -> None:
        lines = [f"cpu{core} {busy} 0 0 12345 67 0 0 0 0 0" for core in cores]
        (tmp_path / "stat").write_text("\n".join(["cpu 1 2 3 4", *lines, "intr 9"]))

    write_stat(100)
    assert times.free_cores() is None
    write_stat(100_000_000)
    free = times.free_cores()
    assert free is not None and free < 0


@pytest.mark.skipif(not VARIANTS, reason="no C++ compiler")
def test_a_team_has_threads_of_this_process() -> None:
    ops = backend(VARIANTS[0])
    assert isinstance(ops, CpuOps)
    team = ops.team_ids(2)
    assert len(set(team)) == 2
    assert {str(each) for each in team} <= set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not VARIANTS, reason="no C++ compiler")
def test_a_linear_has_the_same_bits_on_any_number_of_threads() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(200, 300).bfloat16(), torch.randn(70, 300)
    results: list[torch.Tensor] = []
    for threads in (1, 3, 2):  # the last is that of the other tests
        ops = select("cpu", variant=VARIANTS[0], threads=threads)
        results.append(ops.linear(x, ops.pack_linear(weight)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("quota", "parent", "expected"),
    [
        ("200000 100000", "max 100000", 2),
        ("max 100000", "150000 100000", 2),
        ("50000 100000", "800000 100000", 1),
        ("max 100000", "max 100000", None),
        ("", "", None),
    ],
)
def test_a_container_s_quota_bounds_the_threads(tmp_path: Path, quota, parent, expected) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:memory:/other\n0::/pods/worker\n")
    for folder, text in ((groups / "pods/worker", quota), (groups / "pods", parent)):
        folder.mkdir(parents=True, exist_ok=True)
        if text:
            (folder / "cpu.max").write_text(text + "\n")
    assert quota_cores(proc, groups) == expected
    assert quota_cores(tmp_path / "nothing", groups) is None
