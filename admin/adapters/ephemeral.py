"""Ephemeral versions: a training loop loads them under a name, they are ready at once, and they are
retired automatically.

Their files are validated and addressed by digest like the files of every version. Their effect is
not verified, and no alias points to them. An adapter's plain name refers to the newest one only if
the adapter has no `prod`. Functions that write must be called in a transaction.
"""

from __future__ import annotations

import msgspec

from admin.adapters import retirement, versions
from admin.adapters.aliases import PRODUCTION
from admin.adapters.retirement import Retirement
from admin.adapters.versions import NewVersion
from admin.signing_keys.signing_keys import check_signature
from store.database import Connection
from store.errors import Conflict, Invalid, NotFound
from store.queries import lock_catalog, sql


class Retention(msgspec.Struct, frozen=True):
    """Maximum number and lifetime of an adapter's ephemeral versions."""

    max_versions: int = 4
    """Maximum number of ephemeral versions of an adapter, including the newest."""
    ttl_s: float = 86_400.0
    """Seconds from a version's load until it is retired."""


async def check_name(
    connection: Connection, tenant_id: str, name: str, *, in_place: bool
) -> list[int]:
    """Returns the numbers of the adapter's ephemeral versions, newest first.

    Raises Conflict if the adapter has the alias `prod`. Raises Invalid if the adapter has an
    ephemeral version and `in_place` is not set.
    """
    if await connection.fetchval(sql["ephemeral_is_promoted"], tenant_id, name, PRODUCTION):
        raise Conflict(
            f"the name {name!r} means the version that its alias {PRODUCTION!r} points to: load"
            " under another name, or push the files as a version and promote it",
            "name_promoted",
            "lora_name",
        )
    rows = await connection.fetch(sql["ephemeral_list"], tenant_id, name)
    if rows and not in_place:
        raise Invalid(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter"
            " in place, set 'load_inplace' to True.",
            "adapter_already_loaded",
            "lora_name",
        )
    return [row["version"] for row in rows]


async def add_ephemeral(
    connection: Connection,
    new: NewVersion,
    retention: Retention,
    *,
    in_place: bool,
    default_bytes: int | None = None,
) -> int:
    """Adds a ready ephemeral version and returns its number. Retires the adapter's oldest
    ephemeral versions, so that at most `retention.max_versions` remain. `default_bytes` is the
    limit of a tenant whose quota has no `adapter_bytes`.

    Raises the errors of `check_name`, AlreadyExists if a base model has the name, Conflict if the
    tenant's quota has no room, and Forbidden if the tenant requires signatures, which vLLM's routes
    cannot send.
    """
    await lock_catalog(connection)
    await versions.ensure_adapter(connection, new.tenant_id, new.name)
    numbers = await check_name(connection, new.tenant_id, new.name, in_place=in_place)
    await check_signature(connection, new.tenant_id, new.manifest.digest, None)
    too_many = numbers[retention.max_versions - 1 :]
    if too_many:
        await retirement.retire_versions(connection, new.tenant_id, new.name, too_many)
    await versions.check_holdings(connection, new.tenant_id, new.name, new.manifest, default_bytes)
    number = await connection.fetchval(sql["version_next"], new.tenant_id, new.name)
    await connection.execute(
        sql["ephemeral_insert"],
        *(number, new.manifest.digest, retention.ttl_s),
        *msgspec.structs.astuple(new),
    )
    return number


async def retire_ephemeral(connection: Connection, tenant_id: str, name: str) -> Retirement:
    """Retires all ephemeral versions of an adapter. Raises NotFound if it has none."""
    await lock_catalog(connection)
    rows = await connection.fetch(sql["ephemeral_list"], tenant_id, name)
    if not rows:
        raise NotFound(
            f"The lora adapter '{name}' cannot be found.", "adapter_not_found", "lora_name"
        )
    numbers = [row["version"] for row in rows]
    return await retirement.retire_versions(connection, tenant_id, name, numbers)
