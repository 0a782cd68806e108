"""Holds the catalog in memory: the keys, tenants, models and adapters of one generation.

A `CatalogView` is immutable and is replaced as a whole. So a request continues with the version
that it has resolved, even if another version is promoted later.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from gateway.catalog.canary_split import pick_version
from gateway.catalog.cards import AdapterCard, ModelCard
from gateway.catalog.parts import AdapterPart, TenantPart, adapters_of, tenants_of
from gateway.catalog.principal import Principal
from gateway.catalog.source import SnapshotSource
from gateway.exceptions import CatalogStale, ModelNotFound, TemplateNotApproved
from gateway.quota_types import FREE, ORDINARY, Limit, Service, Tariff
from store.errors import ApiError
from store.records import (
    AdapterPlace,
    Alias,
    ApiKey,
    BaseModel,
    CatalogSnapshot,
    Residency,
    ServedVersion,
    ServingData,
    Tenant,
)
from web.errors import Overloaded
from workers.wire.protocol import AdapterRef, AdapterSignature, DesiredModel, ServiceClass

DEFAULT_ALIAS = "prod"
NOTHING = ServingData()
NO_TENANT = TenantPart()
"""Stands for the part of a tenant that does not exist."""
NO_ADAPTER = AdapterPart()
"""Stands for the part of an adapter name that does not exist."""
CATCH_UP_S = 1.0
"""Maximum seconds that a request with an unknown model name waits for changes of the catalog that
are not loaded yet."""
MAX_LOOKUPS = 2
"""Maximum number of concurrent queries of the catalog's generation. Requests with unknown names
cause them."""


class ResolvedModel(msgspec.Struct, frozen=True):
    """Base model that a model name stands for and, if it names an adapter, the adapter version."""

    name: str
    """Name in the request."""
    base: BaseModel
    version: ServedVersion | None = None
    canary: Alias | None = None
    """Canary from which the version was chosen. None if the name is not a canary."""
    checksums: Mapping[str, str] = {}
    """Checksums of the version's packed image, by the worker layouts for which the version is
    verified."""
    is_template_approved: bool = True

    @property
    def serving(self) -> ServingData:
        """Data of the version apart from its weights."""
        return self.version.serving if self.version else NOTHING

    @property
    def page_salt(self) -> str:
        """Salt that separates an ephemeral version's KV pages from the pages of all other versions,
        even of versions with the same content. Empty if the version is not ephemeral."""
        version = self.version
        if version is None or not version.is_ephemeral:
            return ""
        return f"ephemeral {version.tenant_id}/{version.name}@{version.version}\0"

    def adapter_for(self, layout: str) -> AdapterRef | None:
        """Returns the version's reference for a worker of this layout, or None for a base model."""
        version = self.version
        if version is None:
            return None
        name = f"{version.name}@{version.version}"
        checksum = self.checksums.get(layout, "")
        signed = None
        if version.signature is not None and version.public_key is not None:
            signed = AdapterSignature(version.public_key, version.signature)
        return AdapterRef(version.digest, name, checksum, version.is_ephemeral, signed)

    def chat_template(self) -> str | None:
        """Returns the version's own chat template, or None if the base model's template applies.
        Raises TemplateNotApproved."""
        template = self.serving.chat_template
        if template is not None and not self.is_template_approved:
            raise TemplateNotApproved(
                f"The chat template that '{self.name}' brings may not be rendered yet: "
                "an admin must approve it. Completions are served.",
                param="model",
            )
        return template


class CatalogView:
    """Generation of the catalog, indexed for lookups."""

    def __init__(self, snapshot: CatalogSnapshot, before: CatalogView | None = None) -> None:
        """`before` is the previous view. The unchanged parts are copied from it if the snapshot has
        only the changed ones."""
        self.generation = snapshot.generation
        self.models: dict[str, BaseModel] = {model.name: model for model in snapshot.models}
        self.workers = snapshot.workers
        self._approved_templates = snapshot.approved_templates
        self._prices = {price.model: price for price in snapshot.prices}
        self.tenants: dict[str, Tenant] = {}
        self.keys: dict[str, ApiKey] = {}
        self.keys_by_hash: dict[bytes, ApiKey] = {}
        self._tenants: dict[str | None, TenantPart] = {}
        self._adapters: dict[str, dict[str, AdapterPart]] = {}
        """Parts by tenant id and adapter name. A tenant's dict is shared between views."""
        self._pinned: dict[AdapterPlace, list[Alias]] = {}
        self._judged: dict[AdapterPlace, list[Alias]] = {}
        tenants, adapters = tenants_of(snapshot), adapters_of(snapshot)
        if snapshot.changed is not None and before is not None:
            self.tenants = before.tenants.copy()
            self.keys = before.keys.copy()
            self.keys_by_hash = before.keys_by_hash.copy()
            self._tenants = before._tenants.copy()
            self._adapters = before._adapters.copy()
            self._pinned = before._pinned.copy()
            self._judged = before._judged.copy()
            for tenant_id in (*snapshot.changed.tenants, None):
                self._remove_tenant(tenant_id)
            places = snapshot.changed.adapters | adapters.keys()
            for tenant_id in {place[0] for place in places}:
                self._adapters[tenant_id] = self._adapters.get(tenant_id, {}).copy()
            for place in places:
                self._remove_adapter(place)
        for tenant_id, part in tenants.items():
            self._add_tenant(tenant_id, part)
        for place, part in adapters.items():
            self._add_adapter(place, part)

    def _add_tenant(self, tenant_id: str | None, part: TenantPart) -> None:
        self._tenants[tenant_id] = part
        if part.tenant is not None:
            self.tenants[part.tenant.id] = part.tenant
        for key in part.keys:
            self.keys[key.id] = self.keys_by_hash[key.hash] = key

    def _remove_tenant(self, tenant_id: str | None) -> None:
        part = self._tenants.pop(tenant_id, NO_TENANT)
        if part.tenant is not None:
            del self.tenants[part.tenant.id]
        for key in part.keys:
            del self.keys[key.id], self.keys_by_hash[key.hash]

    def _add_adapter(self, place: AdapterPlace, part: AdapterPart) -> None:
        tenant_id, name = place
        self._adapters.setdefault(tenant_id, {})[name] = part
        if pinned := part.pinned:
            self._pinned[place] = pinned
        if judged := part.judged:
            self._judged[place] = judged

    def _remove_adapter(self, place: AdapterPlace) -> None:
        tenant_id, name = place
        parts = self._adapters.get(tenant_id, {})
        parts.pop(name, None)
        if not parts:
            self._adapters.pop(tenant_id, None)
        self._pinned.pop(place, None)
        self._judged.pop(place, None)

    def _tenant(self, tenant_id: str) -> TenantPart:
        return self._tenants.get(tenant_id, NO_TENANT)

    def _adapters_of(self, tenant: Tenant) -> Mapping[str, AdapterPart]:
        return self._adapters.get(tenant.id, {})

    def resolve(self, tenant: Tenant, name: str, subject: str = "") -> ResolvedModel:
        """Resolves a model name: `name`, `name@alias` or `name@7` (a version), each also as
        `tenant/...`, or the name of a base model. Raises ModelNotFound.

        `subject` identifies the caller. A canary chooses the same version for a subject every time.
        """
        if base := self.models.get(name):
            return ResolvedModel(name=name, base=base)
        adapter, selected = self._select(tenant, name)
        if isinstance(selected, int):
            return self._resolved(tenant, name, adapter, [selected])
        choices = [pick_version(selected, subject), selected.version]
        return self._resolved(
            tenant, name, adapter, choices, selected if selected.canary is not None else None
        )

    def limits_of(self, tenant_id: str, key_subject: str) -> tuple[Limit, ...]:
        """Returns the limits of the tenant and of the key. `key_subject` is
        ApiKey.quota_subject."""
        limits = self._tenant(tenant_id).limits
        return limits.get(tenant_id, ()) + limits.get(key_subject, ())

    def service(self, tenant_id: str) -> Service:
        """Returns the tenant's weight and service class, which determine its share of a busy
        worker."""
        quota = self._tenant(tenant_id).quotas.get(tenant_id)
        if quota is None:
            return ORDINARY
        return Service(quota.weight, ServiceClass(quota.service_class))

    def tariff(self, model: str, tenant_id: str) -> Tariff:
        """Returns the prices of a base model and the weight at which cached tokens count in the
        tenant's quotas. `model` is the base model's served name."""
        quota = self._tenant(tenant_id).quotas.get(tenant_id)
        weight = 100 if quota is None else quota.cached_weight
        return Tariff(self._prices.get(model, FREE), weight)

    def names(self, tenant: Tenant) -> list[str]:
        """Returns the names of base models, then the names of the tenant's adapters: one for each
        alias, and the plain name of an adapter that has ephemeral versions but no alias `prod`.
        `card` raises ModelNotFound for an alias whose version is no longer ready."""
        names = list(self.models)
        parts = self._adapters_of(tenant)
        for adapter in sorted(parts):
            part = parts[adapter]
            if part.newest_ephemeral is not None and DEFAULT_ALIAS not in part.aliases:
                names.append(adapter)
            for alias in sorted(part.aliases):
                names.append(adapter if alias == DEFAULT_ALIAS else f"{adapter}@{alias}")
        return names

    def card(self, tenant: Tenant, name: str) -> ModelCard:
        """Returns the card of a model name. A canary has the card of its stable version, with the
        weights of its versions. Raises ModelNotFound."""
        if base := self.models.get(name):
            return ModelCard(
                id=name,
                created=int(base.created_at.timestamp()),
                owned_by="loraplex",
                root=base.name,
                parent=None,
                max_model_len=base.max_model_len,
            )
        adapter, selected = self._select(tenant, name)
        number = selected if isinstance(selected, int) else selected.version
        resolved = self._resolved(tenant, name, adapter, [number])
        version = resolved.version
        assert version is not None
        serving = version.serving
        return ModelCard(
            id=name,
            created=int(version.created_at.timestamp()),
            owned_by=tenant.name,
            root=f"{adapter}@{number}",
            parent=resolved.base.name,
            max_model_len=resolved.base.max_model_len,
            adapter=AdapterCard(
                **serving.shared(),
                version=number,
                canary=None if isinstance(selected, int) else selected.canary,
                has_chat_template=serving.chat_template is not None,
                is_chat_template_approved=resolved.is_template_approved,
            ),
        )

    def pinned(self) -> Iterator[ResolvedModel]:
        """Yields the versions that pinned aliases point to, including all versions of a canary."""
        for aliases in self._pinned.values():
            for alias in aliases:
                for number in alias.canary or (alias.version,):
                    with contextlib.suppress(ModelNotFound):
                        tenant = self.tenants[alias.tenant_id]
                        yield self._resolved(tenant, alias.name, alias.name, [number])

    def desired_models(self) -> list[DesiredModel]:
        """Returns the desired state of each base model. A digest with several names has one
        entry."""
        by_digest: dict[str, list[BaseModel]] = {}
        for model in self.models.values():
            by_digest.setdefault(model.digest, []).append(model)
        return [
            DesiredModel(
                digest,
                named[0].name,
                is_pinned=any(model.residency == Residency.PINNED for model in named),
                is_unloaded=all(model.residency == Residency.UNLOADED for model in named),
            )
            for digest, named in by_digest.items()
        ]

    def judged(self) -> Iterator[Alias]:
        """Yields the aliases with a canary and a policy, which may be rolled back automatically."""
        for aliases in self._judged.values():
            yield from aliases

    def _select(self, tenant: Tenant, name: str) -> tuple[str, Alias | int]:
        """Returns the adapter's name, and the alias or version number that `name` selects. Raises
        ModelNotFound."""
        owner, slash, rest = name.rpartition("/")
        if slash and owner != tenant.name:
            raise ModelNotFound(name)
        adapter, at, selector = rest.partition("@")
        if selector.isascii() and selector.isdigit() and len(selector) < 10:
            return adapter, int(selector)
        part = self._adapters_of(tenant).get(adapter, NO_ADAPTER)
        alias = part.aliases.get(selector if at else DEFAULT_ALIAS)
        if alias is not None:
            return adapter, alias
        if not at and part.newest_ephemeral is not None:
            return adapter, part.newest_ephemeral
        raise ModelNotFound(name)

    def _resolved(
        self,
        tenant: Tenant,
        name: str,
        adapter: str,
        numbers: Iterable[int],
        canary: Alias | None = None,
    ) -> ResolvedModel:
        """Returns the first of the versions `numbers` that is ready. Raises ModelNotFound."""
        part = self._adapters_of(tenant).get(adapter, NO_ADAPTER)
        for number in numbers:
            version = part.versions.get(number)
            base = self.models.get(version.base_name) if version else None
            if version is not None and base is not None:
                template = version.serving.template_digest
                return ResolvedModel(
                    name=name,
                    base=base,
                    version=version,
                    canary=canary,
                    checksums=part.checksums(version, base.digest),
                    is_template_approved=template is None or template in self._approved_templates,
                )
        raise ModelNotFound(name)


class Catalog:
    """Holder of the newest view of the catalog, which `run` replaces with each snapshot."""

    def __init__(self, source: SnapshotSource, stale_s: float = math.inf) -> None:
        """`stale_s` is the number of seconds for which a view is served that cannot be confirmed to
        be the newest."""
        self._source = source
        self._stale_s = stale_s
        self._view: CatalogView | None = None
        self._watchers: list[Callable[[CatalogView], None]] = []
        self._next = asyncio.Event()
        """Set when the next view is loaded, and then replaced by a new event."""
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
        owner may already have been told that it is ready.
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
