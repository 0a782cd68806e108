"""Where the catalog's snapshots come from: Postgres, by notification and poll."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from admin.database import AdminError, Database
from admin.queries import CATALOG_CHANNEL, catalog_generation, load_catalog
from admin.records import CatalogSnapshot

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 10.0
LOAD_INTERVAL_S = 0.2
"""Between two loads at least: many changes at once are seen together."""


class SnapshotSource(Protocol):
    async def generation(self) -> int:
        """Of what a snapshot would be taken from now. Raises AdminError if it cannot be found."""
        ...

    def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        """The current one, then one after each change, for ever."""
        ...


class PostgresSource:
    """Listens on the catalog's channel, and polls its generation in case a notification is lost.

    A change after a pause is loaded at once, the next ones together `LOAD_INTERVAL_S` later.
    """

    def __init__(self, database: Database, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._database = database
        self._poll_interval_s = poll_interval_s

    async def generation(self) -> int:
        async with self._database.acquire() as connection:
            return await catalog_generation(connection)

    async def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        changed = asyncio.Event()
        await self._listen(changed)
        generation = -1
        while True:
            changed.clear()
            try:
                snapshot = await self._load_if_not(generation)
            except AdminError as error:
                log.warning("the catalog stays as it is: %s", error)
            else:
                if snapshot is not None:
                    generation = snapshot.generation
                    yield snapshot
            await asyncio.sleep(LOAD_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self._poll_interval_s)

    async def _load_if_not(self, generation: int) -> CatalogSnapshot | None:
        async with self._database.acquire() as connection:
            if await catalog_generation(connection) == generation:
                return None
            return await load_catalog(connection)

    async def _listen(self, changed: asyncio.Event) -> None:
        while True:
            try:
                return await self._database.listen(CATALOG_CHANNEL, lambda _: changed.set())
            except AdminError as error:
                log.warning("the catalog cannot be loaded yet: %s", error)
                await asyncio.sleep(1.0)
