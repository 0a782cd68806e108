"""Loads snapshots of the catalog from Postgres, after notifications and by polling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

from store.database import Database
from store.errors import ApiError
from store.queries import CATALOG_CHANNEL, catalog_generation, load_catalog, sql
from store.records import CatalogSnapshot

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 10.0
LOAD_INTERVAL_S = 0.2
"""Minimum seconds between two loads of the catalog, so that many changes are loaded together."""
RETRY_INTERVAL_S = 1.0
"""Seconds between attempts to load the catalog while the database is unavailable."""
LOOK_TIMEOUT_S = 10.0
"""Seconds without an answer after which a connected database counts as unavailable."""


class SnapshotSource(Protocol):
    @property
    def unconfirmed_s(self) -> float:
        """Seconds since the last snapshot was confirmed to be the newest. 0 if the last attempt to
        reach the database succeeded."""
        ...

    async def generation(self) -> int:
        """Returns the current generation of the catalog in the database. Raises ApiError."""
        ...

    def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        """Yields the current snapshot, and then another one after changes, until cancelled. A
        snapshot has all tenants, or only the tenants that have changed since the previous
        snapshot."""
        ...


class PostgresSource:
    """Source that listens for notifications of changes, and also polls the catalog's generation in
    case a notification is lost.

    The first change after a pause is loaded immediately. Changes that follow within
    `LOAD_INTERVAL_S` are loaded together.
    """

    def __init__(self, database: Database, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._database = database
        self._poll_interval_s = poll_interval_s
        self._confirmed_at = time.monotonic()
        self._is_away = False
        self._server: object = None
        """Start time of the database server from which the last snapshot came."""

    @property
    def unconfirmed_s(self) -> float:
        return time.monotonic() - self._confirmed_at if self._is_away else 0.0

    async def generation(self) -> int:
        async with self._database.acquire() as connection:
            return await catalog_generation(connection)

    async def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        changed = asyncio.Event()
        await self._listen(changed)
        generation = -1
        while True:
            changed.clear()
            looked_at = time.monotonic()
            try:
                snapshot = await self._load_if_not(generation)
            except ApiError as error:
                if not self._is_away:
                    log.warning("refreshing the catalog failed, serving the last one: %s", error)
                self._is_away = True
            else:
                if snapshot is not None:
                    generation = snapshot.generation
                    yield snapshot
                # The snapshot counts as confirmed only now, because the code after `yield` runs
                # once the consumer has applied the snapshot.
                self._confirmed_at, self._is_away = looked_at, False
            await asyncio.sleep(LOAD_INTERVAL_S)
            interval_s = RETRY_INTERVAL_S if self._is_away else self._poll_interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await changed.wait()

    async def _load_if_not(self, generation: int) -> CatalogSnapshot | None:
        async with self._database.acquire() as connection:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                state = await connection.fetchrow(sql["catalog_state"])
            assert state is not None
            is_later = state["generation"] > generation and state["server"] == self._server
            if state["generation"] == generation:
                return None
            snapshot = await load_catalog(connection, generation if is_later else None)
            self._server = state["server"]
            return snapshot

    async def _listen(self, changed: asyncio.Event) -> None:
        while True:
            try:
                return await self._database.listen(CATALOG_CHANNEL, lambda _: changed.set())
            except ApiError as error:
                log.warning("loading the catalog failed, trying again: %s", error)
                await asyncio.sleep(1.0)
