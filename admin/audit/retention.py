"""Prunes the audit log: removes rows older than the setting `audit_days`, in batches."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from admin.audit.audit import prune
from store.database import EVERYTHING, Database
from store.errors import ApiError

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 2000
"""Maximum rows verified and removed in a transaction, which takes 20 ms of the event loop."""
SLACK = timedelta(days=1)
"""Time by which a row may exceed its retention before pruning starts. Each prune adds a checkpoint
row to the log, so it should remove many rows."""
INTERVAL_S = 600.0
"""Seconds between checks of the oldest row."""
PAUSE_S = 1.0
"""Seconds between batches, in which other changes can acquire the chain's lock."""


async def keep_audit_days(database: Database, pepper: bytes, days: int) -> None:
    """Prunes the audit log periodically until cancelled."""
    while True:
        pause_s = INTERVAL_S
        try:
            if await prune_old(database, pepper, days) == ROWS_AT_ONCE:
                pause_s = PAUSE_S
        except ApiError as error:
            log.error("pruning the audit log failed: %s", error)
        await asyncio.sleep(pause_s)


async def prune_old(database: Database, pepper: bytes, days: int, limit: int = ROWS_AT_ONCE) -> int:
    """Removes up to `limit` rows older than `days`. Removes nothing until the oldest row has
    exceeded this age by `SLACK`. Returns the number of rows removed. Raises ApiError."""
    before = datetime.now(UTC) - timedelta(days=days)
    async with database.transaction(EVERYTHING) as connection:
        return await prune(connection, pepper, before, SLACK, limit)
