"""Views of an adapter's versions for the routes, in a fixed number of queries."""

from __future__ import annotations

from admin.adapters import adapters, aliases, versions
from admin.adapters.schemas import AdapterSummaryView, AdapterView, AliasView, VersionView
from admin.adapters.versions import VersionDetails
from admin.schemas import shown
from store.database import Connection
from store.records import Alias, Tenant


async def describe_adapter(connection: Connection, tenant: Tenant, name: str) -> AdapterView:
    """Returns an adapter with its versions. Raises NotFound."""
    adapter = await adapters.find_adapter(connection, tenant.id, name)
    found = await versions.list_versions(connection, tenant.id, name)
    pointing = await aliases.list_aliases(connection, tenant.id, name)
    return shown(AdapterView, adapter, versions=await _views(connection, found, pointing))


async def describe_versions(
    connection: Connection, tenant: Tenant, name: str, after: int, limit: int
) -> list[VersionView]:
    """Returns versions with numbers above `after`. Raises NotFound."""
    await adapters.find_adapter(connection, tenant.id, name)
    found = await versions.list_versions(connection, tenant.id, name, after, limit)
    return await _views(connection, found, await aliases.list_aliases(connection, tenant.id, name))


async def describe_version(
    connection: Connection, tenant: Tenant, name: str, version: int
) -> VersionView:
    """Returns a version. Raises NotFound."""
    found = await versions.find_version(connection, tenant.id, name, version)
    pointing = await aliases.list_aliases(connection, tenant.id, name)
    return (await _views(connection, [found], pointing))[0]


async def describe_alias(
    connection: Connection, tenant: Tenant, name: str, alias: str
) -> AliasView:
    """Returns an alias with its history. Raises NotFound."""
    current = await aliases.find_alias(connection, tenant.id, name, alias)
    history = await aliases.alias_history(connection, tenant.id, name, alias)
    return AliasView.of(current, history)


async def _views(
    connection: Connection, found: list[VersionDetails], pointing: list[Alias]
) -> list[VersionView]:
    """Returns views of one adapter's versions."""
    if not found:
        return []
    contents = {version.digest for version in found if version.digest}
    numbers = [version.version for version in found]
    templates = {digest for v in found if (digest := v.serving.template_digest)}
    proofs = await versions.list_proofs(connection, found[0].tenant_id, found[0].name, numbers)
    faults = await versions.list_faults(connection, contents)
    tiers = await adapters.content_tiers(connection, contents)
    approved = await versions.approved_templates(connection, templates)
    return [VersionView.of(version, pointing, proofs, faults, tiers, approved) for version in found]


async def describe_adapters(
    connection: Connection, tenant: Tenant | None, after: str, limit: int
) -> list[AdapterSummaryView]:
    """Returns an entry for each adapter with a name after `after`. If `tenant` is None, lists the
    adapters of all tenants, and `after` is TENANT/NAME."""
    owner, _, name = after.rpartition("/")
    begin = (tenant.name, name) if tenant else (owner, name)
    found = await adapters.list_adapters(connection, tenant.id if tenant else None, begin, limit)
    contents = {digest for adapter in found for digest in adapter.contents.values()}
    tiers = await adapters.content_tiers(connection, contents)
    return [AdapterSummaryView.of(adapter, tiers) for adapter in found]
