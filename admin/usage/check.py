"""Checks that the hourly sums, from which costs are reported, equal the usage rows still kept."""

from __future__ import annotations

import asyncio
import logging

from store.database import EVERYTHING, Database
from store.queries import sql
from telemetry.tallies import Gauge

log = logging.getLogger(__name__)

INTERVAL_S = 86_400.0
PAUSE_S = 1.0
"""Seconds between two days, in which other queries run. A day of a million rows takes a second."""

_num_differing: int | None = None
"""Number of hourly sums that differed in the last check. None before the first one."""

Gauge(
    "loraplex_usage_sums_differing",
    "Hourly sums of usage that differ from their rows, as of the last daily check.",
    lambda: [] if _num_differing is None else [(_num_differing, {})],
)


async def check_usage(database: Database) -> int:
    """Checks each day whose rows are kept, and returns the number of hourly sums that differ. Logs
    the days with such sums. Raises ApiError."""
    global _num_differing
    num_differing = 0
    async with database.transaction(EVERYTHING) as connection:
        days = [row["day"] for row in await connection.fetch(sql["usage_days"])]
    for day in days:
        async with database.transaction(EVERYTHING) as connection:
            found: int = await connection.fetchval(sql["usage_check"], day)
        if found:
            log.error(
                "usage of %s: %d hourly sums differ from the rows they are made of", day, found
            )
        num_differing += found
        await asyncio.sleep(PAUSE_S)
    _num_differing = num_differing
    return num_differing
