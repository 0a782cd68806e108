"""Which contents must be in the store: those that a version names, and those on their way in.

The store and the database change one after the other, so what might have no version is written
down first, and a process may die anywhere: the reaper finds what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from admin.database import Connection, Database
from admin.errors import DatabaseUnavailable, Overtaken
from admin.queries import lock_catalog, sql

RENEW_S = 15.0
"""A third of how long a hold lasts."""
REMOVAL_WAIT_S = 10.0
REMOVER = "-"
"""What the name of a hold begins with under which a content is removed."""


@asynccontextmanager
async def held(database: Database, digest: str) -> AsyncGenerator[str, None]:
    """Keeps the content in the store while this lasts; if it raises, the content is
    due for removal unless a version names it. Yields the holder, for `check_held`.

    Raises Overtaken if the content is being removed, and that takes long.
    """
    holder = secrets.token_hex(8)
    deadline = time.monotonic() + REMOVAL_WAIT_S
    while not await _write_hold(database, "content_hold", digest, holder):
        if time.monotonic() > deadline:
            raise Overtaken
        await asyncio.sleep(0.1)
    is_named = False
    try:
        async with _renewed(database, digest, holder):
            yield holder
        is_named = True
    finally:
        # Else the hold runs out by itself.
        with contextlib.suppress(DatabaseUnavailable):
            async with database.transaction() as connection:
                await connection.execute(sql["content_release"], digest, holder)
                if not is_named:
                    await leave(connection, digest)


async def check_held(connection: Connection, digest: str, holder: str) -> None:
    """Under the catalog's lock. Raises Overtaken if the hold ran out: the content may be gone."""
    if not await connection.fetchval(sql["content_is_held"], digest, holder):
        raise Overtaken


@asynccontextmanager
async def _renewed(database: Database, digest: str, holder: str) -> AsyncGenerator[None, None]:
    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(DatabaseUnavailable):
                await _write_hold(database, "content_renew", digest, holder)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()


async def _write_hold(database: Database, query: str, digest: str, holder: str) -> bool:
    async with database.transaction() as connection:
        # Else a reaper could have found the content free just before and remove it just after.
        await lock_catalog(connection)
        return await connection.fetchval(sql[query], digest, holder) is not None


async def leave_tenant(connection: Connection, tenant_id: str) -> None:
    """Before a tenant is deleted: its contents are due unless another's versions name them."""
    await lock_catalog(connection)
    await connection.execute(sql["contents_leave_of_tenant"], tenant_id)


async def leave(connection: Connection, digest: str) -> None:
    """The content of a version that goes is due unless others name it."""
    await connection.execute(sql["content_leave"], digest)


async def remove_due(database: Database, remove: Callable[[str], Awaitable[None]]) -> None:
    """Calls `remove(digest)` for each content that is due, neither held nor named."""
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
    """The store may be slow: only requests for the content wait for it."""
    try:
        async with _renewed(database, digest, remover):
            await remove(digest)
    except Exception:
        # Not of one that is cancelled, which goes on: its hold runs out.
        async with database.transaction() as connection:
            await connection.execute(sql["content_let_go"], digest, remover)
        raise
    async with database.transaction() as connection:
        await lock_catalog(connection)
        await connection.execute(sql["content_forget"], digest, remover)
