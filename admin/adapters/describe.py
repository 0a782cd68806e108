"""Views of adapters and aliases for the routes, in a fixed number of queries."""

from __future__ import annotations

from admin.adapters import adapters, aliases, versions
from admin.adapters.schemas import AdapterSummaryView, AdapterView, AliasView, VersionView
from admin.schemas import shown
from store.database import Connection
from store.records import Tenant


async def describe_adapter(connection: Connection, tenant: Tenant, name: str) -> AdapterView:
    """Returns an adapter with its versions. Raises NotFound."""
    adapter = await adapters.find_adapter(connection, tenant.id, name)
    found = await versions.list_versions(connection, tenant.id, name)
    return shown(AdapterView, adapter, versions=found)


async def describe_versions(
    connection: Connection, tenant: Tenant, name: str, after: int, limit: int
) -> list[VersionView]:
    """Returns versions with numbers above `after`. Raises NotFound."""
    await adapters.find_adapter(connection, tenant.id, name)
    return await versions.list_versions(connection, tenant.id, name, after, limit)


async def describe_alias(
    connection: Connection, tenant: Tenant, name: str, alias: str
) -> AliasView:
    """Returns an alias with its history. Raises NotFound."""
    current = await aliases.find_alias(connection, tenant.id, name, alias)
    history = await aliases.alias_history(connection, tenant.id, name, alias)
    return AliasView.of(current, history)


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
