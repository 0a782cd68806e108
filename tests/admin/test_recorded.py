"""What the admin plane answers and its commands print is what was recorded: see `recorded.py`."""

from __future__ import annotations

import asyncio

import pytest

from tests.admin import recorded
from tests.admin.calls import ROUTES
from tests.admin.recorded import Recorded

STAGES_BYTES = {"POST /uploads", "PATCH /uploads/{upload_id}", "DELETE /uploads/{upload_id}"}
"""They change no row: what comes of them is logged when a version is made, or expires."""


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


def test_every_route_that_changes_something_is_logged(now: Recorded) -> None:
    changing = {route.name for route in ROUTES if route.method != "GET"} - STAGES_BYTES
    assert {f"{name} by administrator" for name in changing} <= now.logged.keys()
