"""Plugin of pytest that prints the CPU time of tests, and the time that they spend waiting.

    make test ARGS="-p tools.test_costs"

prints the totals after the run, the tests with the most CPU time, and the tests that wait longest.
The cost of a test includes its fixtures and all child processes of pytest. If a process outlives
its parent, only the time before the parent's end is counted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import pytest

NUM_SHOWN = 25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Seconds of a test, or of a phase such as its setup."""

    cpu: float = 0.0
    wall: float = 0.0

    def __add__(self, other: Cost) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(self.cpu + other.cpu, self.wall + other.wall)

    @property
    def waited(self) -> float:
        return self.wall - self.cpu


def used(pid: int) -> float:
    """Returns the CPU seconds of a process and its descendants, including descendants that have
    ended."""
    total = 0.0
    with suppress(OSError):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total = sum(int(field) for field in fields[11:15]) / _TICKS_PER_S
        for task in os.listdir(f"/proc/{pid}/task"):
            # A thread may end in between.
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                total += sum(used(int(child)) for child in file.read().split())
    return total


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs")


class Costs:
    def __init__(self) -> None:
        self._before = Cost()
        self._costs: dict[str, Cost] = defaultdict(Cost)

    def _since(self) -> Cost:
        """Returns the cost since the last call."""
        before, self._before = self._before, Cost(used(os.getpid()), monotonic())
        return Cost(self._before.cpu - before.cpu, self._before.wall - before.wall)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._since()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        report.cost = list(self._since())
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._costs[report.nodeid] += Cost(*report.cost)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        total = sum(self._costs.values(), Cost())
        write(f"tests used {total.cpu:.0f} s of CPU and waited {total.waited:.0f} s")
        for part, does in (("cpu", "use most CPU"), ("waited", "wait longest")):
            write(f"the {NUM_SHOWN} tests that {does}:")
            ranked = sorted(self._costs.items(), key=lambda item: -getattr(item[1], part))
            for name, cost in ranked[:NUM_SHOWN]:
                write(f"{cost.cpu:7.1f} s CPU {cost.waited:7.1f} s waiting  {name}")
