"""What a gateway does beside serving ends when it is told to, whatever happens at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.catalog.view import CatalogView
from gateway.dispatch.fleet import Fleet
from store.periodic import repeat
from store.records import CatalogSnapshot

Work = tuple[Coroutine[Any, Any, None], Callable[[], None]]
"""It, and how it is told that there is something to do."""


async def nothing() -> None:
    pass


def repeated() -> Work:
    wake = asyncio.Event()
    return repeat("nothing is done", nothing, 3600.0, wake), wake.set


def followed() -> Work:
    fleet = Fleet([])
    view = CatalogView(CatalogSnapshot(1, (), (), (), (), ()))
    return fleet.run(), lambda: fleet.follow(view)


@pytest.mark.parametrize("make", [repeated, followed])
@pytest.mark.parametrize("num_ticks", range(5))
async def test_it_ends_while_it_is_being_woken(make: Callable[[], Work], num_ticks: int) -> None:
    work, wake = make()
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    wake()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    task.cancel()
    _, going_on = await asyncio.wait([task], timeout=60)
    assert not going_on
    assert task.cancelled()
