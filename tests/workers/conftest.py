"""Suites of the engine that hold whether a step is collected before the next one is launched or
after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.simulation import Simulation


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "ahead"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    Simulation.runs_ahead = request.param
    yield
    Simulation.runs_ahead = False
