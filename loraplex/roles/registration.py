"""Registers workers. The worker command writes the worker's address to the database. The worker
process itself never connects to the database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

from admin.workers import workers
from loraplex.output import tell
from loraplex.roles.retrying import retry
from store.database import EVERYTHING, Database
from store.errors import ApiError

LEASE_S = 15.0
RENEWALS = 4
"""Number of renewals during one lease."""
LEAVE_S = 5.0
LOOK_INTERVAL_S = 0.1
"""Seconds between checks whether the worker listens."""


@asynccontextmanager
async def registered(
    url: str,
    worker_id: str,
    address: str,
    lease_s: float = LEASE_S,
    *,
    is_listening: Callable[[], bool],
) -> AsyncGenerator[asyncio.Task[None]]:
    """Keeps the worker registered until the end of the block. The registration is a lease, which
    expires if this process is killed. The lease begins when `is_listening`, called in a thread,
    first returns True.

    The yielded task ends only if the worker cannot be registered and a retry would not help. It
    then raises ApiError.
    """
    # Messages of the connection pool are suppressed, because `_renew` reports an unavailable
    # database once.
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    renewal = _renew(url, worker_id, address, lease_s, is_listening)
    # The caller watches the task, because it drains the worker if the task fails.
    renewing = asyncio.create_task(renewal)
    try:
        yield renewing
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])


async def _renew(
    url: str, worker_id: str, address: str, lease_s: float, is_listening: Callable[[], bool]
) -> None:
    """Renews the lease until cancelled. The worker keeps serving while the database is unavailable.
    Raises ApiError if the database was never reached and a retry would not help."""
    connect = partial(
        Database.connect, url, sees=EVERYTHING, max_size=1, application_name="loraplex-worker"
    )
    database = await retry(
        connect,
        lambda reason: tell(f"the worker is not registered: {reason}"),
    )
    is_said = False
    try:
        while not await asyncio.to_thread(is_listening):
            await asyncio.sleep(LOOK_INTERVAL_S)
        while True:
            try:
                await workers.register_worker(database, worker_id, address, lease_s)
                is_said = False
            except ApiError as error:
                if not is_said:
                    tell(f"the worker is not registered: {error}")
                is_said = True
            await asyncio.sleep(lease_s / RENEWALS)
    finally:
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await workers.leave(database, worker_id)
        await database.close()
