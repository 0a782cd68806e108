"""Command groups `loraplex tenant` and `loraplex key`."""

from __future__ import annotations

from typing import Any

import click

from loraplex.commands.command import Group
from loraplex.commands.options import api, confirm, moment, route, yes_option
from loraplex.output import show_done, show_list, show_one
from loraplex.tables import Column, Kind

TENANTS = (
    Column("name", "name", Kind.NAME),
    Column("id", "id", Kind.ID),
    Column("sharing_group", "group"),
    Column("created_at", "created", Kind.AGE),
)
KEYS = (
    Column("id", "id", Kind.NAME),
    Column("name", "name"),
    Column("last_used_at", "used", Kind.AGE),
    Column("expires_at", "expires", Kind.AGE),
    Column("revoked_at", "revoked", Kind.AGE),
    Column("scopes", "scopes"),
    Column("models", "models"),
    Column("cidrs", "networks"),
    Column("created_at", "created", Kind.AGE),
    Column("not_before", "begins", Kind.AGE),
)
SCOPES = ("inference", "adapters:write", "usage:read")


@click.group("tenant", cls=Group)
def tenant_group() -> None:
    """Tenants: owners of keys, adapters, limits and usage."""


@tenant_group.command("create", example="acme")
@click.argument("name")
@click.option("--sharing-group", help="Group of tenants that share cached prefixes.")
def create_tenant(name: str, sharing_group: str | None) -> None:
    """Create a tenant."""
    made = api().post("/admin/v1/tenants", {"name": name, "sharing_group": sharing_group})
    show_done(made, f"{made['name']} ({made['id']})")


@tenant_group.command("list", example="", output="table")
def list_tenants() -> None:
    """List all tenants."""
    show_list(api().all("/admin/v1/tenants"), TENANTS)


@tenant_group.command("show", example="acme")
@click.argument("name")
def show_tenant(name: str) -> None:
    """Show one tenant, by name or id."""
    show_one(api().get(route("tenants", name)), {"created_at": Kind.AGE})


@tenant_group.command("change", example="acme --require-signature")
@click.argument("name")
@click.option("--sharing-group", help="Group of tenants that share cached prefixes; '' removes it.")
@click.option(
    "--require-signature/--no-require-signature",
    default=None,
    help="Accept only adapters signed with a signing key of the tenant, or also unsigned ones.",
)
def change_tenant(name: str, sharing_group: str | None, require_signature: bool | None) -> None:
    """Change with whom a tenant shares cached prefixes, or whether its adapters must be signed."""
    change: dict[str, Any] = {}
    done: list[str] = []
    if sharing_group is not None:
        change["sharing_group"] = sharing_group or None
        shared = f"group {sharing_group}" if sharing_group else "no other tenant"
        done.append(f"{name} shares with {shared}")
    if require_signature is not None:
        change["require_signature"] = require_signature
        done.append(f"{name} {'requires' if require_signature else 'does not require'} signatures")
    if not change:
        raise click.UsageError("give --sharing-group or --require-signature")
    show_done(api().patch(route("tenants", name), change), "; ".join(done))


@tenant_group.command("delete", example="acme --yes")
@click.argument("name")
@yes_option
def delete_tenant(name: str, yes: bool) -> None:
    """Delete a tenant, its keys and its adapters."""
    server = api()
    found = server.get(route("tenants", name))
    confirm(f"Delete tenant {found['name']} ({found['id']}) with its keys and adapters?", yes)
    show_done(server.delete(route("tenants", found["id"])), f"deleted {found['name']}")


@click.group("key", cls=Group)
def key_group() -> None:
    """API keys. The text of a key is shown only when it is created."""


@key_group.command("create", example="--tenant acme --scope inference --expires-at 30d")
@click.option("--tenant", help="Tenant name or id.")
@click.option("--admin", is_flag=True, help="Create a key for the whole admin plane.")
@click.option("--name", help="Note of what the key is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    help="Scope of a tenant's key; may be repeated (default: all).",
)
@click.option(
    "--not-before",
    help="Start of the key's lifetime, such as 7d or 2027-01-01T00:00:00Z (default: now).",
)
@click.option(
    "--expires-at",
    help="End of the key's lifetime, such as 30d or 2027-01-31T00:00:00Z (default: never).",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Allow only this model: NAME, NAME@ALIAS, NAME@VERSION or NAME@*; may be repeated.",
)
@click.option(
    "--cidr",
    "cidrs",
    multiple=True,
    help="Allow only this network, such as 192.0.2.0/24; may be repeated.",
)
def create_key(
    tenant: str | None,
    admin: bool,
    name: str | None,
    not_before: str | None,
    expires_at: str | None,
    **lists: tuple[str, ...],
) -> None:
    """Create and print a key of a tenant, or with --admin a key that may do everything."""
    if admin == (tenant is not None):
        raise click.UsageError("give --tenant NAME, or --admin for a key that may do everything")
    fields = {
        "name": name,
        "not_before": not_before and moment(not_before, ahead=True),
        "expires_at": expires_at and moment(expires_at, ahead=True),
    }
    body = fields | {name: list(given) for name, given in lists.items() if given}
    made = api().post(_keys_of(tenant), body)
    show_done(made, made["key"])


@key_group.command("list", example="--tenant acme", output="table")
@click.option("--tenant", help="Tenant whose keys are listed (default: admin keys).")
def list_keys(tenant: str | None) -> None:
    """List keys, including revoked ones."""
    show_list(api().all(_keys_of(tenant), cursor="id"), KEYS)


@key_group.command("rotate", example="KEY_ID --overlap 86400")
@click.argument("key_id")
@click.option(
    "--overlap",
    type=int,
    metavar="SECONDS",
    help="Seconds for which the old key stays valid (default: 3600).",
)
@click.option(
    "--expires-at",
    help="End of the key's lifetime, such as 30d or 2027-01-31T00:00:00Z (default: the old key's).",
)
def rotate_key(key_id: str, overlap: int | None, expires_at: str | None) -> None:
    """Replace a key by a new one with the same rights, and print it."""
    body = {"overlap_s": overlap, "expires_at": expires_at and moment(expires_at, ahead=True)}
    made = api().post(route("keys", key_id, "rotate"), body)
    show_done(made, made["key"])


@key_group.command("revoke", example="KEY_ID")
@click.argument("key_id")
def revoke_key(key_id: str) -> None:
    """Revoke a key permanently, by its id."""
    show_done(api().delete(route("keys", key_id)), f"revoked {key_id}")


def _keys_of(tenant: str | None) -> str:
    return route("keys") if tenant is None else route("tenants", tenant, "keys")
