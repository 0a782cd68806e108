"""Loads the catalog from the database, holds its newest view, and authenticates API keys by it
without a query."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Protocol

import msgspec

from gateway.catalog.resolved_model import ResolvedModel
from gateway.catalog.view import CatalogView
from gateway.exceptions import CatalogStale, ModelNotFound
from gateway.quota_types import ORDINARY, Limit, Service
from store.database import Database
from store.errors import ApiError
from store.queries import CATALOG_CHANNEL, catalog_generation, load_catalog, sql
from store.records import (
    ApiKey,
    Caller,
    CatalogSnapshot,
    Tenant,
    hash_key,
    parse_key,
    plain_model,
)
from web.errors import Forbidden, Overloaded, Unauthenticated
from web.guards import INCORRECT
from web.request_head import bearer_key

log = logging.getLogger(__name__)

CATCH_UP_S = 1.0
"""Maximum seconds that a request with an unknown model name waits for changes of the catalog that
are not loaded yet."""
MAX_LOOKUPS = 2
"""Maximum number of concurrent queries of the catalog's generation. Requests with unknown model
names cause these queries."""
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


class Principal(msgspec.Struct, frozen=True):
    """Tenant on whose behalf a request is made, and who makes it, with what the catalog says about
    them when the request begins. The whole request is limited and served by that."""

    tenant: Tenant
    who: Caller
    models: frozenset[str] | None = None
    """Names of the tenant's models that the request may use. None allows all of them."""
    limits: tuple[Limit, ...] = ()
    """Limits of the tenant and of the key."""
    service: Service = ORDINARY
    cached_weight: int = 100
    """Weight of a cached prompt token toward quotas, in percent of an uncached one."""

    @property
    def cache_domain(self) -> str:
        """Domain within which cached prefixes are shared."""
        group = self.tenant.sharing_group
        return f"tenant:{self.tenant.id}" if group is None else f"group:{group}"

    def may_use(self, model: str) -> bool:
        """Returns whether the list of models allows the model. In `models`, `bot` permits only the
        alias `prod` of the adapter, and `bot@*` permits all its versions and aliases. Does not
        check whether the tenant has such a model."""
        if self.models is None:
            return True
        name = plain_model(model.removeprefix(f"{self.tenant.name}/"))
        return name in self.models or f"{name.partition('@')[0]}@*" in self.models


def authenticate(
    view: CatalogView, pepper: bytes, authorization: str | None, now: datetime
) -> ApiKey:
    """Returns the valid key of an Authorization header. Raises Unauthenticated with the same
    message for every fault.

    A key is looked up by its keyed hash, and key texts are never compared. A client without the
    whole key cannot choose the hash that is looked up, so the time that a refusal takes reveals
    nothing about the key.
    """
    key = view.keys_by_hash.get(hash_key(_bearer(authorization), pepper))
    if key is None or not key.is_live(now):
        raise Unauthenticated(INCORRECT)
    return key


def may_be_newer(view: CatalogView, authorization: str | None) -> bool:
    """Returns whether the header's key may be newer than the view, because it is well formed and
    its id is not in the view."""
    key_id = parse_key(_bearer(authorization))
    return key_id is not None and key_id not in view.keys


def _bearer(authorization: str | None) -> str:
    """Returns the text of the key in an Authorization header. Raises Unauthenticated if the header
    has no key."""
    text = bearer_key(authorization)
    if text is None:
        raise Unauthenticated(
            "Give your API key in the header 'Authorization: Bearer lpx_...', or 'x-api-key'."
        )
    return text


def is_valid(view: CatalogView, key_id: str, now: datetime) -> bool:
    """Returns whether the key and its tenant exist, and the key is valid at the time `now`. Does
    not check the key's scopes, because they never change."""
    key = view.keys.get(key_id)
    return key is not None and key.is_live(now) and key.tenant_id in view.tenants


def authorize(view: CatalogView, key: ApiKey, scope: str) -> Principal:
    """Returns the caller. Raises Forbidden unless the key belongs to a tenant and has the scope."""
    tenant = view.tenants.get(key.tenant_id) if key.tenant_id else None
    if tenant is None or scope not in key.scopes:
        raise Forbidden(f"This API key lacks the scope '{scope}' for this.")
    limits, service, cached_weight = view.terms_of(tenant.id, key.quota_subject)
    return Principal(tenant, key.caller, key.models, limits, service, cached_weight)


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
