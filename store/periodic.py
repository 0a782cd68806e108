"""Runs work in the background, at intervals or until the end of a block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from store.errors import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, T]) -> AsyncGenerator[asyncio.Task[T]]:
    """Runs `work` in a task, which is cancelled at the end of the block. Yields the task."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def repeat(
    what: str,
    work: Callable[[], Awaitable[object]],
    interval_s: float,
    wake: asyncio.Event | None = None,
) -> None:
    """Runs `work` now, then every `interval_s` seconds and whenever `wake` is set, until cancelled.

    If `work` raises, logs `what` and the error, and runs `work` again after the interval. Only the
    first of consecutive failures is logged.
    """
    wake = wake or asyncio.Event()
    has_failed = False
    while True:
        wake.clear()
        try:
            await work()
            has_failed = False
        except Exception as error:
            if not has_failed:
                unforeseen = None if isinstance(error, ApiError | OSError) else error
                log.warning("%s: %s", what, error, exc_info=unforeseen)
            has_failed = True
            # Waits for the whole interval, because `wake` may be set again and again.
            await asyncio.sleep(interval_s)
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await wake.wait()
