"""Looks API keys up in batches, so that a flood of invalid keys cannot delay valid ones."""

from __future__ import annotations

import asyncio
from itertools import islice

from admin.keys import keys
from store.database import Database
from store.records import ApiKey

LOOKUP_TIMEOUT_S = 2.0
"""Maximum seconds of one query."""
MAX_AT_ONCE = 1000
"""Maximum number of ids in one query, which takes the database a few milliseconds."""

Found = ApiKey | Exception | None


class KeyLookup:
    """Lookup without a cache. Each request waits for a query that begins after the request has
    arrived, so that a revoked key is refused at once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, asyncio.Future[Found]] = {}
        """Futures of the keys that the next query will look up, by key id."""
        self._looking: asyncio.Task[None] | None = None

    async def find(self, key_id: str) -> ApiKey | None:
        """Returns the key as the database has it now, or None if it does not exist. Requests that
        arrive during a query share the next query. Raises DatabaseUnavailable."""
        if key_id not in self._waiting:
            self._waiting[key_id] = asyncio.get_running_loop().create_future()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        # The future is shielded, because other requests may wait for it if this one is cancelled.
        found = await asyncio.shield(self._waiting[key_id])
        if isinstance(found, Exception):
            raise found
        return found

    async def _look(self) -> None:
        while self._waiting:
            ids = list(islice(self._waiting, MAX_AT_ONCE))
            futures = {key_id: self._waiting.pop(key_id) for key_id in ids}
            found = await self._find(ids)
            for key_id, future in futures.items():
                future.set_result(found if isinstance(found, Exception) else found.get(key_id))
        self._looking = None

    async def _find(self, ids: list[str]) -> dict[str, ApiKey] | Exception:
        try:
            async with self._database.acquire() as connection, asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await keys.find_shown_keys(connection, ids)
        except Exception as error:
            return error
