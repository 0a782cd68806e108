"""What the admin plane answers and its commands print is what was recorded: see `recorded.py`."""

from __future__ import annotations

import asyncio

import pytest

from tests.admin import recorded
from tests.admin.calls import ROUTES
from tests.admin.recorded import Recorded


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return asyncio.run(recorded.recorded_now(tmp_path_factory.mktemp("recorded")))


@pytest.mark.parametrize("part", Recorded.__struct_fields__)
def test_it_is_as_recorded(part: str, now: Recorded) -> None:
    before, found = getattr(recorded.read(), part), getattr(now, part)
    changed = [name for name in before | found if before.get(name) != found.get(name)]
    for name in changed:
        print(name, before.get(name), found.get(name), sep="\n  ")
    assert not changed


def test_each_call_succeeds(now: Recorded) -> None:
    """Otherwise the record would be of refusals alone."""
    for route in ROUTES:
        status = now.answers[f"{route.name} by administrator"]["done"].status
        assert status in (200, 201) or route.name == "GET /quota", route.name
