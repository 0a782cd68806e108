"""Holds the newest view of the catalog, and keeps it up to date with the database."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from gateway.catalog.auth import Principal
from gateway.catalog.resolved_model import ResolvedModel
from gateway.catalog.source import SnapshotSource
from gateway.catalog.view import CatalogView
from gateway.exceptions import CatalogStale, ModelNotFound
from store.errors import ApiError
from web.errors import Overloaded

CATCH_UP_S = 1.0
"""Maximum seconds that a request with an unknown model name waits for changes of the catalog that
are not loaded yet."""
MAX_LOOKUPS = 2
"""Maximum number of concurrent queries of the catalog's generation. Requests with unknown model
names cause these queries."""


class Catalog:
    """Holder of the newest view of the catalog, which `run` replaces with each snapshot."""

    def __init__(self, source: SnapshotSource, stale_s: float = math.inf) -> None:
        """`stale_s` is the maximum number of seconds for which a view is served while it cannot be
        confirmed to be the newest."""
        self._source = source
        self._stale_s = stale_s
        self._view: CatalogView | None = None
        self._watchers: list[Callable[[CatalogView], None]] = []
        self._next = asyncio.Event()
        """Event that is set when the next view is loaded, and is then replaced by a new event."""
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self.loaded = asyncio.Event()

    @property
    def view(self) -> CatalogView | None:
        """Newest view. None until the first snapshot is loaded."""
        return self._view

    @property
    def current(self) -> CatalogView:
        """Newest view. Raises Overloaded until the first snapshot is loaded, and CatalogStale if
        the view was not confirmed for too long."""
        if self._view is None:
            raise Overloaded("The gateway is starting.")
        if self.is_stale:
            raise CatalogStale("The gateway has been without its database for too long.")
        return self._view

    @property
    def unconfirmed_s(self) -> float:
        """Seconds since the view was last confirmed to be the newest. 0 while the database
        answers."""
        return self._source.unconfirmed_s

    @property
    def is_stale(self) -> bool:
        return self._source.unconfirmed_s > self._stale_s

    async def resolve(self, caller: Principal, name: str, subject: str) -> ResolvedModel:
        """Resolves a model name in the view that is newest when this method returns. Raises
        ModelNotFound if the model is unknown or the key may not use it, and Overloaded or
        CatalogStale if there is no usable view.

        If the name is unknown, first waits for changes that are not loaded yet, because the model's
        owner may already have been notified that the model is ready.
        """
        if not caller.may_use(name):
            raise ModelNotFound(name)
        try:
            return self.current.resolve(caller.tenant, name, subject)
        except ModelNotFound:
            await self._catch_up()
        return self.current.resolve(caller.tenant, name, subject)

    async def _catch_up(self) -> None:
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                async with self._lookups:
                    generation = await self._source.generation()
                while self.current.generation < generation:
                    await self._next.wait()

    def watch(self, callback: Callable[[CatalogView], None]) -> None:
        """Registers a function that is called with each new view, after the view is in use for
        requests."""
        self._watchers.append(callback)

    async def run(self) -> None:
        async for snapshot in self._source.snapshots():
            self._view = view = CatalogView(snapshot, self._view)
            self.loaded.set()
            self._next.set()
            self._next = asyncio.Event()
            for callback in self._watchers:
                callback(view)
