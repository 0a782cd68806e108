"""Finds the key of a request in the database, at every call, and bounds what made-up keys cost."""

from __future__ import annotations

import asyncio

from admin import keys
from admin.database import Database
from admin.errors import DatabaseUnavailable
from admin.records import ApiKey

LOOKUP_TIMEOUT_S = 2.0
MAX_STRANGERS = 2
"""Ids looked up at a time that were never found before: a flood leaves the pool to the others."""
STRANGER_WAIT_S = 5.0
"""For one's turn among them."""


class KeyLookup:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._met: set[str] = set()
        """Ids that were found; only of keys that exist, else anybody could fill the memory."""
        self._strangers = asyncio.Semaphore(MAX_STRANGERS)

    async def find(self, key_id: str) -> ApiKey | None:
        """Raises DatabaseUnavailable, soon enough for somebody who waits for an answer."""
        if key_id in self._met:
            return await self._find(key_id)
        try:
            async with asyncio.timeout(STRANGER_WAIT_S):
                await self._strangers.acquire()
        except TimeoutError as error:
            raise DatabaseUnavailable("too many unknown API keys are being looked up") from error
        try:
            return await self._find(key_id)
        finally:
            self._strangers.release()

    async def _find(self, key_id: str) -> ApiKey | None:
        async with self._database.acquire() as connection, asyncio.timeout(LOOKUP_TIMEOUT_S):
            key = await keys.find_shown_key(connection, key_id)
        if key is not None:
            self._met.add(key_id)
        return key
