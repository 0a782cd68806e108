"""Which tests a run has, in which order, and what it says of those that it left out.

`make test` runs the first tier: every test that is not marked `full`, its properties with
`QUICK_EXAMPLES` examples. `make test-all` runs everything; `--tier rest` is what `make test` left
out, so that both together are everything, once. Tests marked `soak` or `chaos` run in their short
form here, and in full by `make soak` and `make chaos`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import mul
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.scale import IS_FULL

DURATIONS = Path(__file__).with_name("durations.txt")
"""Seconds of each file's tests in the first tier and in the rest, and its path; sorted by path."""
NOTED_S = 1.0
"""A file that takes less is left out."""
QUICK_EXAMPLES = 20
_PROPERTY = "_hypothesis_internal_use_settings"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("quick", "rest", "all"),
        default="all",
        help="quick: what `make test` runs; rest: what it leaves out (default: all)",
    )
    parser.addoption(
        "--write-durations", action="store_true", help=f"rewrites {DURATIONS.name} after the run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(config), "tiers")


class Tiers:
    """Hooks of one process of a run; of several, the one that started the others collects no tests
    and reports the results of all."""

    def __init__(self, config: pytest.Config) -> None:
        self._tier: Any = config.getoption("tier")
        self._marks: Any = config.getoption("markexpr")
        self._num_left_out = 0
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Of set-up, call and teardown in the first tier and in the rest, by file."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept, left_out = list[pytest.Item](), list[pytest.Item]()
        for item in items:
            (kept if self._has(item) else left_out).append(item)
        self._num_left_out = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(kept, key=self._seconds_of(config), reverse=True)

    def _seconds_of(self, config: pytest.Config) -> Callable[[pytest.Item], float]:
        """Returns how long a test's file takes, so that of several processes none has a long file
        left when the others have ended."""
        known = _read_durations()
        taken = {"quick": (1, 0), "rest": (0, 1), "all": (1, 1)}[self._tier]

        def seconds(item: pytest.Item) -> float:
            path = item.path.relative_to(config.rootpath).as_posix()
            return sum(map(mul, taken, known.get(path, (0.0, 0.0))))

        return seconds

    def _has(self, item: pytest.Item) -> bool:
        match self._tier:
            case "quick":
                return not _is_full(item)
            case "rest":
                return _is_full(item) or num_examples(item) > QUICK_EXAMPLES
            case _:
                return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Runs the tier's part of a property's examples."""
        holder = _holder(item)
        if holder is None or self._tier == "all" or _is_full(item):
            return (yield)
        everything = getattr(*holder)
        num_quick = min(everything.max_examples, QUICK_EXAMPLES)
        # A hook of `tests/ops` may have left so few that the first tier has run all of them.
        rest = max(1, everything.max_examples - num_quick)
        part = num_quick if self._tier == "quick" else rest
        setattr(*holder, hypothesis.settings(everything, max_examples=part))
        try:
            return (yield)
        finally:
            setattr(*holder, everything)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]]["full" in report.keywords] += (
            report.duration
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["num_left_out"] = self._num_left_out
        elif session.config.getoption("write_durations"):
            noted = sorted((n, s) for n, s in self._seconds.items() if sum(s) >= NOTED_S)
            lines = [f"{quick:.0f} {rest:.0f} {path}\n" for path, (quick, rest) in noted]
            DURATIONS.write_text("".join(lines))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # Each process has collected all tests.
        self._num_left_out = getattr(node, "workeroutput", {}).get("num_left_out", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if IS_FULL:
            marked = self._marks or "soak or chaos"
            terminalreporter.write_line(f"not run: what is not {marked} (make test-all runs it)")
            return
        not_run = ["the full forms of soak and chaos tests (make soak, make chaos)"]
        if self._tier != "all":
            other = "make test-all" if self._tier == "quick" else "make test"
            not_run.insert(0, f"{self._num_left_out} tests ({other} runs them)")
        terminalreporter.write_line(f"not run: {', '.join(not_run)}")


def _is_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is not None


def _read_durations() -> dict[str, tuple[float, float]]:
    if not DURATIONS.exists():
        return {}
    lines = (line.split(" ", 2) for line in DURATIONS.read_text().splitlines())
    return {path: (float(quick), float(rest)) for quick, rest, path in lines}


def _holder(item: pytest.Item) -> tuple[Any, str] | None:
    """Returns the object and the attribute with the settings of a property, or None if the test is
    none."""
    cls = getattr(item, "cls", None)
    if hasattr(cls, "settings"):
        return cls, "settings"
    test = getattr(item, "obj", None)
    return (test, _PROPERTY) if hasattr(test, _PROPERTY) else None


def num_examples(item: pytest.Item) -> int:
    """Returns how many examples a property has, or 0 if the test is none."""
    holder = _holder(item)
    return 0 if holder is None else getattr(*holder).max_examples
