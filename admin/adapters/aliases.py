"""Aliases: names that point to a version, or split requests over several versions (a canary).

Functions that write must be called in a transaction, and lock the catalog in it. A move of an alias
takes effect in one step, for every later request, and is recorded in the alias's history.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from store.database import Connection
from store.errors import Conflict, Invalid, NotFound
from store.queries import fetch_all, fetch_one, from_row, lock_catalog, sql
from store.records import AdapterState, Alias, CanaryPolicy

PRODUCTION = "prod"
"""Name of the alias to which a plain adapter name refers."""
MAX_TARGETS = 8


class AliasMove(msgspec.Struct, frozen=True):
    """Entry of an alias's history."""

    version: int
    previous: int | None
    """Version that the alias pointed to before the move."""
    reason: str
    changed_by: str | None
    """Id of the key that moved the alias. None if no request caused the move."""
    changed_at: datetime
    canary: dict[int, int] | None = None
    policy: CanaryPolicy | None = None
    detail: str | None = None


class _Target(msgspec.Struct, frozen=True):
    version: int
    reason: str
    canary: dict[int, int] | None = None
    policy: CanaryPolicy | None = None


async def list_aliases(connection: Connection, tenant_id: str, name: str) -> list[Alias]:
    return await fetch_all(connection, Alias, "alias_list", tenant_id, name, None)


async def find_alias(connection: Connection, tenant_id: str, name: str, alias: str) -> Alias:
    """Returns an alias. Raises NotFound."""
    missing = NotFound(f"adapter {name[:128]!r} has no alias {alias[:64]!r}", "alias_not_found")
    return await fetch_one(connection, Alias, "alias_list", tenant_id, name, alias, missing=missing)


async def alias_history(
    connection: Connection, tenant_id: str, name: str, alias: str
) -> list[AliasMove]:
    """Returns the last hundred moves of an alias, newest first."""
    return await fetch_all(connection, AliasMove, "alias_history", tenant_id, name, alias)


async def set_alias(
    connection: Connection,
    tenant_id: str,
    name: str,
    alias: str,
    version: int,
    key_id: str | None = None,
    *,
    completions_only: bool = False,
) -> None:
    """Points `alias` to a ready version, which ends the alias's canary.

    If `completions_only` is set, also accepts a version whose chat template awaits approval. Chat
    requests to such a version are refused. Raises NotFound and Invalid. Raises Conflict if
    the version is not ready, its template is not approved, or pins would exceed the quota.
    """
    await lock_catalog(connection)
    target = _Target(version, "promote")
    await _point(connection, tenant_id, name, alias, target, key_id, completions_only)


async def set_canary(
    connection: Connection,
    tenant_id: str,
    name: str,
    alias: str,
    weights: dict[int, int],
    policy: CanaryPolicy | None,
    key_id: str | None = None,
    *,
    completions_only: bool = False,
) -> None:
    """Splits the alias's requests over ready versions by weight.

    `weights` maps version numbers to weights. It must include the version that the alias points to
    now, the stable version, which gets all requests if the canary fails. If `completions_only` is
    set, also accepts versions whose chat template awaits approval. Raises NotFound, Conflict and
    Invalid.
    """
    await lock_catalog(connection)
    if not 2 <= len(weights) <= MAX_TARGETS:
        raise Invalid(f"a canary set has 2 to {MAX_TARGETS} versions", "canary_size", "canary")
    stable = (await find_alias(connection, tenant_id, name, alias)).version
    if stable not in weights:
        raise Conflict(
            f"{alias!r} points to version {stable}, which must be in the set as the one to go back"
            " to: give it a weight, or promote another version first",
            "canary_without_stable",
            "canary",
        )
    target = _Target(stable, "canary", weights, policy)
    await _point(connection, tenant_id, name, alias, target, key_id, completions_only)


async def roll_back(
    connection: Connection, tenant_id: str, name: str, alias: str, key_id: str | None = None
) -> None:
    """Undoes the last move: restores the version or canary that the alias pointed to before. Skips
    moves to deleted versions.

    A second call undoes the first. Raises NotFound. Raises Conflict if the alias was never moved,
    or if the earlier target is not ready.
    """
    await lock_catalog(connection)
    current = await find_alias(connection, tenant_id, name, alias)
    row = await connection.fetchrow(
        sql["alias_before"], tenant_id, name, alias, current.change or 0
    )
    before = from_row(_Target, row) if row else None
    if before is None or before.reason == "deleted":
        raise Conflict(
            f"{name}@{alias} never pointed to anything else that is still there",
            "nothing_to_roll_back",
        )
    target = msgspec.structs.replace(before, reason="rollback")
    await _point(connection, tenant_id, name, alias, target, key_id)


async def delete_alias(
    connection: Connection, tenant_id: str, name: str, alias: str, key_id: str | None = None
) -> None:
    """Deletes an alias, but not its history. Raises NotFound, or Conflict for `prod`."""
    await lock_catalog(connection)
    await find_alias(connection, tenant_id, name, alias)
    if alias == PRODUCTION:
        raise Conflict(
            f"{PRODUCTION!r} is what the plain name means: promote another version, or delete the"
            " adapter",
            "alias_required",
        )
    await connection.execute(sql["alias_delete"], tenant_id, name, alias, key_id)


async def pin_alias(
    connection: Connection, tenant_id: str, name: str, alias: str, pinned: bool
) -> None:
    """Pins the alias's versions to the device, or unpins them. Raises NotFound, or Conflict if the
    pins would exceed the quota."""
    await lock_catalog(connection)
    await find_alias(connection, tenant_id, name, alias)
    await connection.execute(sql["alias_pin"], tenant_id, name, alias, pinned)
    await check_pins(connection, tenant_id)


async def check_pins(connection: Connection, tenant_id: str) -> None:
    """Raises Conflict if the tenant's pinned aliases need more bytes than its quota allows."""
    row = await connection.fetchrow(sql["pinned_bytes"], tenant_id)
    if row is not None and row["used"] > row["allowed"]:
        raise Conflict(
            f"the pinned aliases would point to {row['used']} bytes and this tenant may pin"
            f" {row['allowed']}: unpin another, or have an admin raise its quota's pin_bytes",
            "pin_quota",
        )


async def _point(
    connection: Connection,
    tenant_id: str,
    name: str,
    alias: str,
    target: _Target,
    key_id: str | None,
    completions_only: bool = False,
) -> None:
    """Moves an alias to a target. The caller must hold the catalog's lock. Raises NotFound, or
    Conflict if the target is not ready or lacks a required signature, or if the tenant's pins would
    exceed its quota."""
    wanted = set(target.canary or {}) | {target.version}
    rows = await connection.fetch(sql["version_states"], tenant_id, name, sorted(wanted))
    states = {row["version"]: row["state"] for row in rows}
    ephemeral = {row["version"] for row in rows if row["is_ephemeral"]}
    unsigned = {row["version"] for row in rows if row["lacks_signature"]}
    for version in sorted(wanted):
        if version not in states:
            raise NotFound(f"no version {version} of adapter {name[:128]!r}", "version_not_found")
        if version in ephemeral:
            raise Conflict(
                f"version {version} is ephemeral: it expires, and its effect was never proved. Push"
                " its files as a version (loraplex adapter push) and promote that",
                "version_ephemeral",
                "version",
            )
        if version in unsigned:
            raise Conflict(
                f"version {version} is not signed, and this tenant requires signatures: push its"
                " files again with --sign KEYFILE",
                "version_not_signed",
                "version",
            )
        if states[version] == AdapterState.AWAITING_APPROVAL:
            if completions_only:
                continue
            raise Conflict(
                f"version {version} brings a chat template that no admin has approved, so its chats"
                " would be refused. An admin approves it with: loraplex adapter approve"
                f" {name}@{version} --tenant {rows[0]['owner']}. Or push it without the template,"
                " or say completions_only (--completions-only)",
                "template_not_approved",
                "version",
            )
        if states[version] != AdapterState.READY:
            raise Conflict(
                f"version {version} is {states[version]}, not ready", "version_not_ready", "version"
            )
    await connection.fetchval(
        sql["alias_point"],
        *(tenant_id, name, alias, target.version, _as_keys(target.canary), target.policy),
        *(key_id, target.reason, None, None),
    )
    await check_pins(connection, tenant_id)


def _as_keys(canary: dict[int, int] | None) -> dict[str, int] | None:
    """Returns the weights with version numbers as text, because JSON object keys are texts."""
    return None if canary is None else {str(version): w for version, w in canary.items()}
