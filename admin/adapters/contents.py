"""Tracks which contents must be in the store: the contents of versions, and contents that are being
uploaded. A content is the files of an adapter, identified by their digest.

The store and the database do not change in one transaction. Contents that may end up without a
version are therefore recorded in the database first, so that the reaper finds them after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from store.database import Connection, Database
from store.errors import ApiError, DatabaseUnavailable, Overtaken
from store.periodic import in_background
from store.queries import lock_catalog, sql

RENEW_S = 15.0
"""Seconds between renewals of a hold on a content. A hold expires after three times as long."""
REMOVAL_WAIT_S = 10.0
REMOVER = "-"
"""First character of a holder's id if it holds the content in order to remove it."""


@asynccontextmanager
async def held(database: Database, digest: str) -> AsyncGenerator[str, None]:
    """Prevents the reaper from removing a content from the store until the end of the block. If
    the block raises, the content becomes due for removal, unless a version has it. Yields the
    holder's id, for `check_held`.

    Waits while the content is being removed. Raises Overtaken if the removal takes longer than
    `REMOVAL_WAIT_S`.
    """
    holder = secrets.token_hex(8)
    deadline = time.monotonic() + REMOVAL_WAIT_S
    while not await _write_hold(database, "content_hold", digest, holder):
        if time.monotonic() > deadline:
            raise Overtaken
        await asyncio.sleep(0.1)
    is_named = False
    try:
        async with in_background(_renew(database, digest, holder)):
            yield holder
        is_named = True
    finally:
        # If the release fails, the hold expires later.
        with contextlib.suppress(DatabaseUnavailable):
            async with database.transaction() as connection:
                await connection.execute(sql["content_release"], digest, holder)
                if not is_named:
                    await leave(connection, digest)


async def check_held(connection: Connection, digest: str, holder: str) -> None:
    """Raises Overtaken if the hold expired and was deleted, because the content may then have been
    removed. The caller must hold the catalog's lock."""
    if not await connection.fetchval(sql["content_is_held"], digest, holder):
        raise Overtaken


async def _renew(database: Database, digest: str, holder: str) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(ApiError):
            await _write_hold(database, "content_renew", digest, holder)


async def _write_hold(database: Database, query: str, digest: str, holder: str) -> bool:
    async with database.transaction() as connection:
        # Without the catalog's lock, a reaper could find the content free just before this hold is
        # written, and remove the content just after.
        await lock_catalog(connection)
        return await connection.fetchval(sql[query], digest, holder) is not None


async def leave(connection: Connection, digest: str) -> None:
    """Marks the content of a deleted version as due for removal. The reaper keeps a content that
    other versions have."""
    await connection.execute(sql["content_leave"], digest)


async def remove_due(database: Database, remove: Callable[[str], Awaitable[None]]) -> None:
    """Calls `remove(digest)` for each content that is due for removal, unless the content is held
    or a version has it."""
    async with database.acquire() as connection:
        due = [row["digest"] for row in await connection.fetch(sql["contents_due"])]
    for digest in due:
        remover = f"{REMOVER}{secrets.token_hex(8)}"
        async with database.transaction() as connection:
            await lock_catalog(connection)
            is_free = await connection.fetchval(sql["content_is_free"], digest)
            await connection.execute(sql["content_settle"], digest)
            if is_free:
                await connection.fetchval(sql["content_hold"], digest, remover)
        if is_free:
            await _remove(database, digest, remover, remove)


async def _remove(
    database: Database, digest: str, remover: str, remove: Callable[[str], Awaitable[None]]
) -> None:
    """Removes a content from the store. Holds no database lock during the removal, because the
    store may be slow. Only uploads of the same content wait for the removal."""
    try:
        async with in_background(_renew(database, digest, remover)):
            await remove(digest)
    except Exception:
        # The removal failed, so the content is made due for removal again. A cancelled task skips
        # this, because a thread still removes the content; its hold on the content then expires.
        async with database.transaction() as connection:
            await connection.execute(sql["content_let_go"], digest, remover)
        raise
    async with database.transaction() as connection:
        await lock_catalog(connection)
        await connection.execute(sql["content_forget"], digest, remover)
