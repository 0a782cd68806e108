"""Runs work in the background, at intervals or until the end of a block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from store.errors import ApiError
from telemetry.tallies import Gauge

log = logging.getLogger(__name__)

T = TypeVar("T")


RETRY_INTERVAL_S = 60.0
"""Maximum seconds until a task that failed runs again."""
LOG_INTERVAL_S = 600.0
"""Seconds after which a task that still fails is logged again."""

_failing_since: dict[str, float] = {}
"""Time at which each task of this process began to fail, in seconds since 1970, by what it does
not do. 0 if its last run succeeded."""


Gauge(
    "loraplex_task_failing_since_timestamp_seconds",
    "Time since which a background task has failed, in seconds since 1970, by `task`, which says"
    " what is not done. 0 if its last run succeeded.",
    lambda: [(since, {"task": what}) for what, since in list(_failing_since.items())],
)


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, T]) -> AsyncGenerator[asyncio.Task[T]]:
    """Runs `work` in a task, which is cancelled at the end of the block. Yields the task.

    If `work` raises, the block is cancelled, and the error is raised in its place.
    """
    owner = asyncio.current_task()
    assert owner is not None
    failure: BaseException | None = None
    is_open = True

    def end(task: asyncio.Task[T]) -> None:
        nonlocal failure
        if is_open and not task.cancelled() and (failure := task.exception()) is not None:
            owner.cancel()

    task = asyncio.create_task(work)
    task.add_done_callback(end)
    try:
        yield task
    except asyncio.CancelledError:
        if failure is None or owner.uncancel():
            raise
        raise failure from None
    finally:
        is_open = False
        task.cancel()
        await asyncio.wait([task])


async def repeat(
    what: str,
    work: Callable[[], Awaitable[object]],
    interval_s: float,
    wake: asyncio.Event | None = None,
) -> None:
    """Runs `work` now, then every `interval_s` seconds and whenever `wake` is set, until cancelled.

    If `work` raises, logs `what` and the error, and runs `work` again after the interval, at most
    `RETRY_INTERVAL_S`. Consecutive failures are logged once in `LOG_INTERVAL_S`, and the metric of
    failing tasks shows since when the task fails.
    """
    wake = wake or asyncio.Event()
    logged_at = -math.inf
    _failing_since[what] = 0
    while True:
        wake.clear()
        try:
            await work()
            _failing_since[what], logged_at = 0, -math.inf
        except Exception as error:
            _failing_since[what] = _failing_since[what] or time.time()
            if time.monotonic() - logged_at >= LOG_INTERVAL_S:
                unforeseen = None if isinstance(error, ApiError | OSError) else error
                log.warning("%s: %s", what, error, exc_info=unforeseen)
                logged_at = time.monotonic()
            # Waits for the whole interval, because `wake` may be set again and again.
            await asyncio.sleep(min(interval_s, RETRY_INTERVAL_S))
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await wake.wait()
