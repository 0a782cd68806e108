"""Divides the catalog into parts: the keys and limits of one tenant, or the versions and aliases of
one adapter. A new view reuses the parts that have not changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gateway.quota_types import Limit, limits_of
from store.records import (
    AdapterPlace,
    AdapterProof,
    Alias,
    ApiKey,
    CatalogSnapshot,
    Quota,
    ServedVersion,
    Tenant,
)


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
        """Number of the newest ephemeral version. The plain name stands for it if the adapter has
        no alias `prod`."""
        self._checksums: dict[tuple[str, str], dict[str, str]] = {}

    @property
    def pinned(self) -> list[Alias]:
        return [alias for alias in self.aliases.values() if alias.pinned]

    @property
    def judged(self) -> list[Alias]:
        """Aliases with a canary and a policy, which may be rolled back automatically."""
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
    """Returns the tenants' parts by tenant id. The part of the key None holds the admin keys."""
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
