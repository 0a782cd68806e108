"""Routes of aliases: point to a version or a canary, roll back, pin.

A request with an admin key must name the tenant in the parameter `tenant`.
"""

from __future__ import annotations

from admin.adapters import aliases
from admin.adapters.schemas import AliasSet, AliasView
from admin.http.entities import Entity
from admin.http.guards import ADAPTERS_WRITE, ADMIN
from admin.schemas import Deleted, shown
from store.database import Connection
from store.errors import Invalid
from store.records import Caller, CanaryPolicy


async def show_alias(connection: Connection, tenant_id: str, name: str, alias: str) -> AliasView:
    """Shows an alias with its history."""
    current = await aliases.find_alias(connection, tenant_id, name, alias)
    history = await aliases.alias_history(connection, tenant_id, name, alias)
    return shown(AliasView, current, history=history)


ALIASES = Entity(
    *("Alias", "/adapters/{name:str}/aliases/{alias:str}", "adapters", AliasView, show_alias),
    scopes=(ADMIN, ADAPTERS_WRITE),
    may_be_new=True,
)
ALIASES.shows()(show_alias)


@ALIASES.changes("PUT")
async def set_alias(
    connection: Connection, tenant_id: str, name: str, alias: str, data: AliasSet, caller: Caller
) -> AliasView:
    """Promotes a version or starts a canary in one step, for every later request."""
    place = connection, tenant_id, name, alias
    options = {"completions_only": data.completions_only}
    if data.version is not None and data.canary is None and not data.policy:
        await aliases.set_alias(*place, data.version, caller.id, **options)
    elif data.canary is not None and data.version is None:
        policy = data.policy if isinstance(data.policy, CanaryPolicy | None) else CanaryPolicy()
        await aliases.set_canary(*place, data.canary, policy, caller.id, **options)
    else:
        raise Invalid("give a version, or a canary set with or without a policy")
    return await show_alias(*place)


@ALIASES.changes("DELETE")
async def delete_alias(
    connection: Connection, tenant_id: str, name: str, alias: str, caller: Caller
) -> Deleted:
    """Deletes an alias. 409 for `prod`, which is deleted with its adapter."""
    await aliases.delete_alias(connection, tenant_id, name, alias, caller.id)
    return Deleted(f"{name}@{alias}")


@ALIASES.changes("POST", "/rollback")
async def roll_back(
    connection: Connection, tenant_id: str, name: str, alias: str, caller: Caller
) -> AliasView:
    """Undoes the alias's last move, by restoring the previous version or canary. A second call
    undoes the first, so clients that may repeat the request should send If-Match."""
    await aliases.roll_back(connection, tenant_id, name, alias, caller.id)
    return await show_alias(connection, tenant_id, name, alias)


@ALIASES.changes("PUT", "/pin")
async def pin(connection: Connection, tenant_id: str, name: str, alias: str) -> AliasView:
    """Pins the alias, so that the versions to which it points, now or later, stay on the
    device. 409 if the quota does not allow it."""
    await aliases.pin_alias(connection, tenant_id, name, alias, pinned=True)
    return await show_alias(connection, tenant_id, name, alias)


@ALIASES.changes("DELETE", "/pin")
async def unpin(connection: Connection, tenant_id: str, name: str, alias: str) -> AliasView:
    """Unpins the alias: its versions may be evicted from the device."""
    await aliases.pin_alias(connection, tenant_id, name, alias, pinned=False)
    return await show_alias(connection, tenant_id, name, alias)
