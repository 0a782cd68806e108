"""Command group `loraplex signing-key`."""

from __future__ import annotations

from pathlib import Path

import click

from loraplex.commands.command import Group
from loraplex.commands.options import api, route, tenant_option
from loraplex.output import show_done, show_list
from loraplex.tables import Column, Kind

SIGNING_KEYS = (
    Column("id", "id", Kind.NAME),
    Column("name", "name"),
    Column("versions", "versions", Kind.NUMBER),
    Column("revoked_at", "revoked", Kind.AGE),
    Column("created_at", "created", Kind.AGE),
    Column("public_key", "public key", Kind.ID),
)


@click.group("signing-key", cls=Group)
def signing_key_group() -> None:
    """Public keys with which a tenant signs its adapters (adapter push --sign)."""


@signing_key_group.command("create", example="id_ed25519.pub --tenant acme")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the key (default: name of the file).")
@tenant_option
def create_signing_key(file: Path, name: str | None, tenant: str | None) -> None:
    """Register the ed25519 public key in FILE (PEM or OpenSSH, such as id_ed25519.pub)."""
    body = {"name": name or file.stem, "public_key": file.read_text(errors="replace")[:1024]}
    made = api().post(route("signing-keys"), body, tenant=tenant)
    show_done(made, f"{made['name']} ({made['id']})")


@signing_key_group.command("list", example="--tenant acme", output="table")
@tenant_option
def list_signing_keys(tenant: str | None) -> None:
    """List signing keys, including revoked ones."""
    show_list(api().all(route("signing-keys"), cursor="id", tenant=tenant), SIGNING_KEYS)


@signing_key_group.command("revoke", example="KEY_ID --tenant acme")
@click.argument("key_id")
@tenant_option
def revoke_signing_key(key_id: str, tenant: str | None) -> None:
    """Revoke a signing key permanently. Versions signed with it are still served, and are shown as
    signed with a revoked key."""
    gone = api().delete(route("signing-keys", key_id), tenant=tenant)
    show_done(gone, f"revoked {key_id}, which signed {gone['versions']} version(s)")
