"""What may be called by which name, by whom: the gateway's view of the control plane, in memory.

A `CatalogView` is immutable and replaced whole, so a request that has resolved its model keeps its
version whatever is promoted meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from admin.database import Database, DatabaseUnavailable
from admin.queries import CATALOG_CHANNEL, catalog_generation, load_catalog
from admin.records import AdapterVersion, ApiKey, BaseModel, CatalogSnapshot, Tenant
from gateway.errors import ModelNotFound
from gateway.schemas import ModelCard
from workers.protocol import AdapterRef

log = logging.getLogger(__name__)

DEFAULT_ALIAS = "prod"
POLL_INTERVAL_S = 10.0


class Target(msgspec.Struct, frozen=True):
    """What a model name means: a base model, and an immutable adapter version on it or none."""

    name: str
    """As asked."""
    base: BaseModel
    version: AdapterVersion | None = None
    adapter: AdapterRef | None = None
    """The version as the data path knows it; its name is `name@version`."""


class CatalogView:
    """One snapshot, indexed."""

    def __init__(self, snapshot: CatalogSnapshot) -> None:
        self.generation = snapshot.generation
        self.keys: dict[str, ApiKey] = {key.id: key for key in snapshot.keys}
        self.tenants: dict[str, Tenant] = {tenant.id: tenant for tenant in snapshot.tenants}
        self.models: dict[str, BaseModel] = {model.name: model for model in snapshot.models}
        self._versions = {(v.tenant_id, v.name, v.version): v for v in snapshot.versions}
        self._aliases: dict[str, dict[tuple[str, str], int]] = {}
        for alias in snapshot.aliases:
            of_tenant = self._aliases.setdefault(alias.tenant_id, {})
            of_tenant[alias.name, alias.alias] = alias.version

    def resolve(self, tenant: Tenant, name: str) -> Target:
        """`name`, `name@alias`, `name@7`, `tenant/...` of these, or a base; ModelNotFound."""
        if base := self.models.get(name):
            return Target(name=name, base=base)
        owner, slash, rest = name.rpartition("/")
        if slash and owner != tenant.name:
            raise ModelNotFound(name)
        adapter, _, selector = rest.partition("@")
        if selector.isascii() and selector.isdigit() and len(selector) < 10:
            number = int(selector)
        else:
            alias = selector if "@" in rest else DEFAULT_ALIAS
            number = self._aliases.get(tenant.id, {}).get((adapter, alias), 0)
        version = self._versions.get((tenant.id, adapter, number))
        if version is None or version.digest is None:
            raise ModelNotFound(name)
        base = self.models.get(version.base_name or "")
        if base is None:
            raise ModelNotFound(name)
        ref = AdapterRef(digest=version.digest, name=f"{adapter}@{number}")
        return Target(name=name, base=base, version=version, adapter=ref)

    def list(self, tenant: Tenant) -> list[ModelCard]:
        """Base models, then the tenant's adapters by each name that an alias gives them."""
        names = list(self.models)
        for adapter, alias in sorted(self._aliases.get(tenant.id, {})):
            names.append(adapter if alias == DEFAULT_ALIAS else f"{adapter}@{alias}")
        cards: list[ModelCard] = []
        for name in names:
            # An alias may point to a version that is no longer ready.
            with contextlib.suppress(ModelNotFound):
                cards.append(self.card(tenant, name))
        return cards

    def card(self, tenant: Tenant, name: str) -> ModelCard:
        """ModelNotFound as `resolve`."""
        target = self.resolve(tenant, name)
        base, version, adapter = target.base, target.version, target.adapter
        return ModelCard(
            id=name,
            created=int((version or base).created_at.timestamp()),
            owned_by=tenant.name if version else "loraplex",
            root=adapter.name if adapter else base.name,
            parent=base.name if version else None,
            max_model_len=base.max_model_len,
        )


class SnapshotSource(Protocol):
    """Where snapshots come from."""

    def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        """The current one, then one after each change, for ever."""
        ...


class PostgresSource:
    """Listens on the catalog's channel, and polls its generation in case a notification is lost."""

    def __init__(self, database: Database, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._database = database
        self._poll_interval_s = poll_interval_s

    async def snapshots(self) -> AsyncIterator[CatalogSnapshot]:
        changed = asyncio.Event()
        await self._listen(changed)
        generation = -1
        while True:
            changed.clear()
            try:
                async with self._database.acquire() as connection:
                    if await catalog_generation(connection) != generation:
                        snapshot = await load_catalog(connection)
                        generation = snapshot.generation
                        yield snapshot
            except DatabaseUnavailable as error:
                log.warning("the catalog stays as it is: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self._poll_interval_s)

    async def _listen(self, changed: asyncio.Event) -> None:
        while True:
            try:
                return await self._database.listen(CATALOG_CHANNEL, lambda _: changed.set())
            except DatabaseUnavailable as error:
                log.warning("the catalog cannot be loaded yet: %s", error)
                await asyncio.sleep(1.0)


class Catalog:
    """Holds the newest view; `run` keeps it so."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._view: CatalogView | None = None
        self.loaded = asyncio.Event()

    @property
    def view(self) -> CatalogView | None:
        """None until the first snapshot."""
        return self._view

    async def run(self) -> None:
        async for snapshot in self._source.snapshots():
            self._view = CatalogView(snapshot)
            self.loaded.set()
