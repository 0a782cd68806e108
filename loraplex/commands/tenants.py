"""`loraplex tenant` and `loraplex key`."""

from __future__ import annotations

from typing import Any

import click

from loraplex.commands.options import api, json_option, route
from loraplex.output import show

TENANT_COLUMNS = ("name", "id", "sharing_group", "created_at")
KEY_COLUMNS = (
    *("id", "name", "scopes", "models", "cidrs", "created_at", "not_before", "expires_at"),
    *("revoked_at", "last_used_at"),
)


expiry_option = click.option("--expires-at", help="Such as 2027-01-31T00:00:00Z.")


@click.group("tenant")
def tenant_group() -> None:
    """Tenants: owners of keys, adapters, limits and usage."""


@tenant_group.command("create")
@click.argument("name")
@click.option("--sharing-group", help="Tenants of one group share cached prefixes.")
def create_tenant(name: str, sharing_group: str | None) -> None:
    """Create a tenant."""
    with api() as server:
        made = server.post("/admin/v1/tenants", {"name": name, "sharing_group": sharing_group})
    click.echo(f"{made['name']} ({made['id']})")


@tenant_group.command("list")
@json_option
def list_tenants(as_json: bool) -> None:
    """List all tenants."""
    with api() as server:
        show(server.all("/admin/v1/tenants"), TENANT_COLUMNS, as_json)


@tenant_group.command("show")
@click.argument("name")
@json_option
def show_tenant(name: str, as_json: bool) -> None:
    """Show one tenant, by name or id."""
    with api() as server:
        show([server.get(route("tenants", name))], TENANT_COLUMNS, as_json)


@tenant_group.command("change")
@click.argument("name")
@click.option("--sharing-group", required=True, help="Group that shares cached prefixes; '': none.")
def change_tenant(name: str, sharing_group: str) -> None:
    """Change the group of tenants that a tenant shares cached prefixes with."""
    with api() as server:
        server.patch(route("tenants", name), {"sharing_group": sharing_group or None})
    click.echo(
        f"{name} shares with {f'group {sharing_group}' if sharing_group else 'no other tenant'}"
    )


@tenant_group.command("delete")
@click.argument("name")
@click.confirmation_option(prompt="Delete the tenant with its keys and adapters?")
def delete_tenant(name: str) -> None:
    """Delete a tenant, its keys and its adapters."""
    with api() as server:
        server.delete(route("tenants", name))
    click.echo(f"deleted {name}")


@click.group("key")
def key_group() -> None:
    """API keys. A key's text is shown once, when it is made."""


@key_group.command("create")
@click.option("--tenant", help="Whose key; without it an admin key.")
@click.option("--name", help="For you to remember what it is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    help="Of a tenant's key: inference, adapters:write, usage:read; default: all. May be repeated.",
)
@click.option("--not-before", help="Such as 2027-01-01T00:00:00Z.")
@expiry_option
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Only for this one: NAME, NAME@ALIAS, NAME@VERSION or NAME@*; may be repeated.",
)
@click.option("--cidr", "cidrs", multiple=True, help="Only from this network; may be repeated.")
@json_option
def create_key(
    tenant: str | None,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    cidrs: tuple[str, ...],
    as_json: bool,
    **fields: str | None,
) -> None:
    """Create a key and print it."""
    lists = {"scopes": list(scopes), "models": list(models), "cidrs": list(cidrs)}
    body = fields | {name: given for name, given in lists.items() if given}
    with api() as server:
        _show_made(server.post(_keys_of(tenant), body), as_json)


@key_group.command("list")
@click.option("--tenant", help="Whose keys; without it the admin keys.")
@json_option
def list_keys(tenant: str | None, as_json: bool) -> None:
    """List keys, revoked ones too."""
    with api() as server:
        show(server.all(_keys_of(tenant), cursor="id"), KEY_COLUMNS, as_json)


@key_group.command("rotate")
@click.argument("key_id")
@click.option("--overlap", type=int, metavar="SECONDS", help="The old key goes on so long; 3600.")
@expiry_option
@json_option
def rotate_key(key_id: str, overlap: int | None, expires_at: str | None, as_json: bool) -> None:
    """Replace a key by a new one with the same rights, and print that."""
    body = {"overlap_s": overlap, "expires_at": expires_at}
    with api() as server:
        _show_made(server.post(route("keys", key_id, "rotate"), body), as_json)


@key_group.command("revoke")
@click.argument("key_id")
def revoke_key(key_id: str) -> None:
    """Revoke a key for good, by its id."""
    with api() as server:
        server.delete(route("keys", key_id))
    click.echo(f"revoked {key_id}")


def _show_made(made: dict[str, Any], as_json: bool) -> None:
    """The only time that the key is seen."""
    if as_json:
        show([made], (), as_json)
    else:
        click.echo(made["key"])


def _keys_of(tenant: str | None) -> str:
    return route("keys") if tenant is None else route("tenants", tenant, "keys")
