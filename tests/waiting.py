"""Waits of tests until what they expect is so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

WAIT_S = 60.0


async def eventually(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    """Returns when the condition, which may be a coroutine function, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


def until(condition: Callable[[], Any], what: object = "", timeout_s: float = 180.0) -> None:
    """Returns when the condition is true. what: is said if it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
