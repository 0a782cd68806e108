"""Which contents must be in the store: those that a version names, and those on their way in.

The store and the database change one after the other, so what might have no version is written
down first, and a process may die anywhere: the reaper finds what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from admin.adapters import lock_catalog
from admin.database import Connection, Database
from admin.errors import DatabaseUnavailable
from admin.queries import sql

RENEW_S = 15.0
"""A third of how long a hold lasts."""


@asynccontextmanager
async def held(database: Database, digest: str) -> AsyncGenerator[None, None]:
    """Nobody removes the content from the store while this lasts; if it raises, the content is
    due for removal unless a version names it."""
    holder = secrets.token_hex(8)
    await _hold(database, digest, holder)
    renewing = asyncio.create_task(_renew(database, digest, holder))
    is_named = False
    try:
        yield
        is_named = True
    finally:
        renewing.cancel()
        # Else the hold runs out by itself.
        with contextlib.suppress(DatabaseUnavailable):
            async with database.transaction() as connection:
                await connection.execute(sql["content_release"], digest, holder)
                if not is_named:
                    await leave(connection, digest)


async def _hold(database: Database, digest: str, holder: str) -> None:
    async with database.transaction() as connection:
        # Else somebody could have found the content free just before and remove it just after.
        await lock_catalog(connection)
        await connection.execute(sql["content_hold"], digest, holder)


async def _renew(database: Database, digest: str, holder: str) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(DatabaseUnavailable):
            await _hold(database, digest, holder)


async def leave_tenant(connection: Connection, tenant_id: str) -> None:
    """Before a tenant is deleted: its contents are due unless another's versions name them."""
    await lock_catalog(connection)
    await connection.execute(sql["contents_leave_of_tenant"], tenant_id)


async def leave(connection: Connection, digest: str) -> None:
    """The content of a version that goes is due unless others name it."""
    await connection.execute(sql["content_leave"], digest)


async def remove_due(database: Database, remove: Callable[[str], Awaitable[None]]) -> None:
    """Calls `remove(digest)` for each content that is due, held by nobody and named by none."""
    async with database.acquire() as connection:
        due = [row["digest"] for row in await connection.fetch(sql["contents_due"])]
    for digest in due:
        async with database.transaction() as connection:
            await lock_catalog(connection)
            if await connection.fetchval(sql["content_is_free"], digest):
                await remove(digest)
                await connection.execute(sql["content_forget"], digest)
            else:
                await connection.execute(sql["content_settle"], digest)
