"""Prunes the audit log: removes rows older than the setting `audit_days`, in batches."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from admin.audit.audit import prune
from store.database import EVERYTHING, Database

ROWS_AT_ONCE = 2000
"""Maximum rows verified and removed in a transaction, which takes 20 ms of the event loop."""
SLACK = timedelta(days=1)
"""Time by which a row may exceed its retention before pruning starts. Each prune adds a checkpoint
row to the log, so it should remove many rows."""
INTERVAL_S = 600.0
"""Seconds between checks of the oldest row."""
PAUSE_S = 1.0
"""Seconds between batches, in which other changes can acquire the chain's lock."""


async def prune_all(database: Database, pepper: bytes, days: int) -> None:
    """Prunes the audit log until no row is too old. Raises ApiError."""
    while await prune_old(database, pepper, days) == ROWS_AT_ONCE:
        await asyncio.sleep(PAUSE_S)


async def prune_old(database: Database, pepper: bytes, days: int, limit: int = ROWS_AT_ONCE) -> int:
    """Removes up to `limit` rows older than `days`. Removes nothing until the oldest row has
    exceeded this age by `SLACK`. Returns the number of rows removed. Raises ApiError."""
    before = datetime.now(UTC) - timedelta(days=days)
    async with database.transaction(EVERYTHING) as connection:
        return await prune(connection, pepper, before, SLACK, limit)
