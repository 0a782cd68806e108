"""The part of the catalog that is one tenant's, indexed. A view that follows another takes over
those of the tenants of whom nothing has changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from admin.records import (
    AdapterProof,
    Alias,
    ApiKey,
    CatalogSnapshot,
    Quota,
    ServedVersion,
    Tenant,
)
from gateway.quota import Limit, limits_of


class TenantCatalog:
    """Complete once `parts_of` returns it; not changed afterwards."""

    def __init__(self) -> None:
        self.tenant: Tenant | None = None
        """None: of the admin keys, which are nobody's."""
        self.keys: list[ApiKey] = []
        self.versions: dict[tuple[str, int], ServedVersion] = {}
        """By name and number."""
        self.aliases: dict[tuple[str, str], Alias] = {}
        """By the adapter's name and its own."""
        self.pinned: list[Alias] = []
        self.judged: list[Alias] = []
        """Canary sets that may go back by themselves."""
        self.quotas: dict[str, Quota] = {}
        """By subject, as are the limits."""
        self.limits: dict[str, tuple[Limit, ...]] = {}
        self._checksums: dict[tuple[str, str], dict[str, str]] = {}

    def checksums(self, version: ServedVersion, base_digest: str) -> Mapping[str, str]:
        """Of the version's packed image for this base, by worker layout, as far as it is proved."""
        return self._checksums.get((version.digest, base_digest), {})

    def add_version(self, version: ServedVersion, proofs: list[AdapterProof]) -> None:
        self.versions[version.name, version.version] = version
        for proof in proofs:
            by_layout = self._checksums.setdefault((proof.digest, proof.base_digest), {})
            by_layout[proof.layout] = proof.checksum

    def add_alias(self, alias: Alias) -> None:
        self.aliases[alias.name, alias.alias] = alias
        if alias.pinned:
            self.pinned.append(alias)
        if alias.canary is not None and alias.policy is not None:
            self.judged.append(alias)

    def add_quota(self, quota: Quota) -> None:
        self.quotas[quota.subject] = quota
        self.limits[quota.subject] = limits_of(quota)


def parts_of(snapshot: CatalogSnapshot) -> dict[str | None, TenantCatalog]:
    """By tenant's id; None: the admin keys."""
    parts: defaultdict[str | None, TenantCatalog] = defaultdict(TenantCatalog)
    subjects: dict[str, TenantCatalog] = {}
    for tenant in snapshot.tenants:
        subjects[tenant.id] = parts[tenant.id]
        parts[tenant.id].tenant = tenant
    for key in snapshot.keys:
        parts[key.tenant_id].keys.append(key)
        subjects[key.quota_subject] = parts[key.tenant_id]
    proofs: dict[str, list[AdapterProof]] = {}
    for proof in snapshot.proofs:
        proofs.setdefault(proof.digest, []).append(proof)
    for version in snapshot.versions:
        parts[version.tenant_id].add_version(version, proofs.get(version.digest, []))
    for alias in snapshot.aliases:
        parts[alias.tenant_id].add_alias(alias)
    for quota in snapshot.quotas:
        # A key that is revoked may have had one.
        if quota.subject in subjects:
            subjects[quota.subject].add_quota(quota)
    return parts
