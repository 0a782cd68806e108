"""Retries until the database is available."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from store.errors import DatabaseMisconfigured, DatabaseUnavailable

T = TypeVar("T")

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0


async def retry(attempt: Callable[[], Awaitable[T]], report: Callable[[str], None]) -> T:
    """Returns the result of `attempt`, which is retried while it raises DatabaseUnavailable. Calls
    `report` whenever the reason changes. Raises all other errors."""
    backoff_s = FIRST_BACKOFF_S
    said = ""
    while True:
        try:
            return await attempt()
        except DatabaseMisconfigured:
            raise
        except DatabaseUnavailable as error:
            if str(error) != said:
                report(str(error))
            said = str(error)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
