"""Work in the background never ends without a sign: it is repeated, or its owner ends with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from adapters.store.folder import LocalStore
from admin.app import create_app
from admin.audit import retention
from admin.upkeep.reaper import Reaper
from admin.usage import usage
from store import periodic
from store.database import Database
from store.errors import ApiError
from store.periodic import in_background, repeat
from telemetry.tallies import PAGE
from tests.admin.conftest import CONFIG
from tests.waiting import eventually


def samples() -> list[Sample]:
    name = "loraplex_task_failing_since_timestamp_seconds"
    return next(family.samples for family in PAGE.collect() if family.name == name)


def since(task: str) -> float:
    return next((each.value for each in samples() if each.labels["task"] == task), 0.0)


@pytest.mark.parametrize("error", [ApiError("refused"), TypeError("ours"), OSError("theirs")])
async def test_a_failure_is_shown_until_it_is_over(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "LOG_INTERVAL_S", 0.05)
    fails, num_runs = True, 0

    async def work() -> None:
        nonlocal num_runs
        num_runs += 1
        if fails:
            raise error

    async with in_background(repeat("nothing is done", work, 0.01)):
        with caplog.at_level(logging.WARNING):
            await eventually(lambda: len(caplog.records) >= 3)
        assert num_runs > len(caplog.records)
        assert since("nothing is done") > 1e9
        fails = False
        await eventually(lambda: since("nothing is done") == 0)


async def test_a_failed_task_ends_its_owner_with_its_error() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("the cause")

    async def own() -> None:
        async with in_background(fail()):
            await asyncio.Event().wait()

    with pytest.raises(ValueError, match="the cause"):
        await asyncio.wait_for(own(), 60)


async def test_an_owner_that_is_cancelled_meanwhile_stays_cancelled() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def own() -> None:
        async with in_background(fail()):
            await asyncio.Event().wait()

    task = asyncio.create_task(own())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.wait([task], timeout=60)
    assert task.done()
    assert task.cancelled() or isinstance(task.exception(), ValueError)


async def test_the_owner_gets_the_result_and_ends_the_rest() -> None:
    ended = False

    async def last() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    async with in_background(asyncio.sleep(0, "result")) as task, in_background(last()):
        assert await task == "result"
        await asyncio.sleep(0)
    assert ended


@pytest.mark.parametrize(
    ("owner", "name", "task"),
    [
        (usage, "keep_days", "old usage is not dropped"),
        (retention, "prune_all", "the audit log is not pruned"),
        (Reaper, "reap", "nothing is removed"),
        (Reaper, "prune", "nothing is pruned"),
    ],
)
async def test_no_task_of_the_admin_plane_ends_the_others(
    owner: object,
    name: str,
    task: str,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Awaitable[None]:
        raise TypeError("ours")

    works: Callable[..., Awaitable[object]] = getattr(owner, name)
    assert works
    monkeypatch.setattr(owner, name, broken)
    plane = create_app(CONFIG, database=database, store=LocalStore(tmp_path)).state.admin
    async with in_background(plane.run()) as running:
        await eventually(lambda: since(task) > 0)
        others = {sample.labels["task"] for sample in samples()} - {task}
        assert {"answers of creates are kept", "the use of keys is not written down"} <= others
        assert not running.done()
