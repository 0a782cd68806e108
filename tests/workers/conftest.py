"""Suites of the engine that hold whether a step is collected before the next one is launched or
after; and all of them: nothing waits while it holds the memory lock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import watched_lock
from tests.workers.simulation import Simulation


@pytest.fixture(scope="package", autouse=True)
def watched_locks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        watched_lock.watch(patch)
        yield


@pytest.fixture(autouse=True)
def no_wait_under_the_memory_lock(watched_locks: None) -> Iterator[None]:
    watched_lock.violations.clear()
    yield
    assert not watched_lock.violations, watched_lock.violations[0]


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "ahead"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    Simulation.runs_ahead = request.param
    yield
    Simulation.runs_ahead = False
