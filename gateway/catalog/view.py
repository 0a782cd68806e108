"""Indexes one generation of the catalog: the keys, tenants, models and adapters that it has.

A `CatalogView` is immutable and is replaced as a whole. So a request continues with the version
that it has resolved, even if another version is promoted later. The view consists of parts: each
holds the keys and limits of one tenant, or the versions and aliases of one adapter. A new view
reuses the parts that have not changed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from gateway.catalog.resolved_model import AdapterCard, ModelCard, ResolvedModel, pick_version
from gateway.exceptions import ModelNotFound
from gateway.quota_types import FREE, ORDINARY, Limit, Service, limits_of
from store.records import (
    AdapterPlace,
    AdapterProof,
    Alias,
    ApiKey,
    BaseModel,
    CatalogSnapshot,
    Price,
    Quota,
    Residency,
    ServedVersion,
    Tenant,
)
from workers.wire.frames import DesiredModel
from workers.wire.protocol import ServiceClass

DEFAULT_ALIAS = "prod"


class TenantPart:
    """Tenant with its keys and limits. Must not be changed after `tenants_of` has returned it."""

    def __init__(self) -> None:
        self.tenant: Tenant | None = None
        """Tenant of the part. None in the part that holds the admin keys."""
        self.keys: list[ApiKey] = []
        self.quotas: dict[str, Quota] = {}
        """Quotas by subject, which is the tenant's id or a key's ApiKey.quota_subject."""
        self.limits: dict[str, tuple[Limit, ...]] = {}

    def add_quota(self, quota: Quota) -> None:
        self.quotas[quota.subject] = quota
        self.limits[quota.subject] = limits_of(quota)


class AdapterPart:
    """Adapter name with its versions and aliases. Must not be changed after `adapters_of` has
    returned it."""

    def __init__(self) -> None:
        self.versions: dict[int, ServedVersion] = {}
        """Ready versions by number."""
        self.aliases: dict[str, Alias] = {}
        self.newest_ephemeral: int | None = None
        """Number of the newest ephemeral version. The adapter's plain name stands for this version
        if the adapter has no alias `prod`."""
        self._checksums: dict[tuple[str, str], dict[str, str]] = {}

    @property
    def pinned(self) -> list[Alias]:
        return [alias for alias in self.aliases.values() if alias.pinned]

    @property
    def judged(self) -> list[Alias]:
        """Aliases whose canary has a policy, and may therefore be rolled back automatically."""
        return [
            alias
            for alias in self.aliases.values()
            if alias.canary is not None and alias.policy is not None
        ]

    def checksums(self, version: ServedVersion, base_digest: str) -> Mapping[str, str]:
        """Returns the checksums of the version's packed image for this base model, by worker
        layout."""
        return self._checksums.get((version.digest, base_digest), {})

    def add_version(self, version: ServedVersion, proofs: list[AdapterProof]) -> None:
        self.versions[version.version] = version
        if version.is_ephemeral:
            self.newest_ephemeral = max(version.version, self.newest_ephemeral or 0)
        for proof in proofs:
            by_layout = self._checksums.setdefault((proof.digest, proof.base_digest), {})
            by_layout[proof.layout] = proof.checksum


def tenants_of(snapshot: CatalogSnapshot) -> dict[str | None, TenantPart]:
    """Returns the tenants' parts by tenant id. The part under None holds the admin keys."""
    parts: defaultdict[str | None, TenantPart] = defaultdict(TenantPart)
    subjects: dict[str, TenantPart] = {}
    for tenant in snapshot.tenants:
        subjects[tenant.id] = parts[tenant.id]
        parts[tenant.id].tenant = tenant
    for key in snapshot.keys:
        parts[key.tenant_id].keys.append(key)
        subjects[key.quota_subject] = parts[key.tenant_id]
    for quota in snapshot.quotas:
        # A quota may belong to a revoked key, which is not in the snapshot.
        if quota.subject in subjects:
            subjects[quota.subject].add_quota(quota)
    return parts


def adapters_of(snapshot: CatalogSnapshot) -> dict[AdapterPlace, AdapterPart]:
    parts: defaultdict[AdapterPlace, AdapterPart] = defaultdict(AdapterPart)
    proofs: dict[str, list[AdapterProof]] = {}
    for proof in snapshot.proofs:
        proofs.setdefault(proof.digest, []).append(proof)
    for version in snapshot.versions:
        part = parts[version.tenant_id, version.name]
        part.add_version(version, proofs.get(version.digest, []))
    for alias in snapshot.aliases:
        parts[alias.tenant_id, alias.name].aliases[alias.alias] = alias
    return parts


NO_TENANT = TenantPart()
"""Empty part, used for a tenant that does not exist."""
NO_ADAPTER = AdapterPart()
"""Empty part, used for an adapter name that does not exist."""


class CatalogView:
    """Generation of the catalog, indexed for lookups."""

    def __init__(self, snapshot: CatalogSnapshot, before: CatalogView | None = None) -> None:
        """`before` is the previous view. If the snapshot contains only changed parts, the other
        parts are copied from `before`."""
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
        """Parts by tenant id and adapter name. A tenant's dict is shared between views, and copied
        before it is changed."""
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
            # The adapters of a deleted tenant are deleted from the database later.
            gone = [each for each in snapshot.changed.tenants if each not in tenants]
            places |= {(each, name) for each in gone for name in self._adapters.get(each, ())}
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
        """Resolves a model name: `name`, `name@alias` or `name@7` (a version), which may have the
        prefix `tenant/`, or the name of a base model. Raises ModelNotFound.

        `subject` identifies the caller. A canary chooses the same version for a subject every time.
        """
        if base := self.models.get(name):
            return ResolvedModel(name=name, base=base, price=self._price(base))
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

    def terms_of(self, tenant_id: str, key_subject: str) -> tuple[tuple[Limit, ...], Service, int]:
        """Returns the result of `limits_of`, the tenant's weight and service class, and the weight
        at which cached tokens count in its quotas, in percent."""
        limits = self.limits_of(tenant_id, key_subject)
        quota = self._tenant(tenant_id).quotas.get(tenant_id)
        if quota is None:
            return limits, ORDINARY, 100
        service = Service(quota.weight, ServiceClass(quota.service_class))
        return limits, service, quota.cached_weight

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
        """Yields aliases whose canary has a policy and may be rolled back automatically."""
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

    def _price(self, base: BaseModel) -> Price:
        return self._prices.get(base.name, FREE)

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
                    price=self._price(base),
                    version=version,
                    canary=canary,
                    checksums=part.checksums(version, base.digest),
                    is_template_approved=template is None or template in self._approved_templates,
                )
        raise ModelNotFound(name)
