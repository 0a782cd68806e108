"""`loraplex adapter`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from loraplex.commands.options import api, json_option
from loraplex.output import show

F = TypeVar("F", bound=Callable[..., Any])
VERSIONS = ("version", "state", "model", "max_rank", "file_bytes", "aliases", "created_at", "error")


def tenant_option(command: F) -> F:
    return click.option("--tenant", help="Whose; a tenant's own key needs none.")(command)


@click.group("adapter")
def adapter_group() -> None:
    """Adapters: immutable versions, and aliases that point to them."""


@adapter_group.command("push")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", required=True)
@click.option("--model", help="The base model; without it the tensors decide.")
@click.option("--alias", help="Point this alias to the new version.")
@tenant_option
@json_option
def push(
    folder: Path,
    name: str,
    model: str | None,
    alias: str | None,
    tenant: str | None,
    as_json: bool,
) -> None:
    """Upload what peft saved in FOLDER as a new version."""
    with api() as server:
        made = server.push(folder, name=name, model=model, alias=alias, tenant=tenant)
    if as_json:
        show([made], (), as_json)
    else:
        aliases = f" ({', '.join(made['aliases'])})" if made["aliases"] else ""
        click.echo(f"{name}@{made['version']}{aliases}")


@adapter_group.command("list")
@tenant_option
@json_option
def list_adapters(tenant: str | None, as_json: bool) -> None:
    """List adapters with their aliases."""
    with api() as server:
        found = server.all("/admin/v1/adapters", tenant=tenant)
    if not as_json:
        found = [adapter | {"versions": len(adapter["versions"])} for adapter in found]
    show(found, ("name", "tenant", "versions", "aliases", "created_at"), as_json)


@adapter_group.command("show")
@click.argument("name")
@tenant_option
@json_option
def show_adapter(name: str, tenant: str | None, as_json: bool) -> None:
    """Show an adapter's versions."""
    with api() as server:
        found = server.get(f"/admin/v1/adapters/{name}", tenant=tenant)
    show([found] if as_json else found["versions"], VERSIONS, as_json, title=name)


@adapter_group.command("promote")
@click.argument("version")
@click.option("--alias", default="prod", show_default=True)
@tenant_option
def promote(version: str, alias: str, tenant: str | None) -> None:
    """Point an alias to a version, given as NAME@VERSION."""
    name, _, number = version.partition("@")
    if not number.isdigit():
        raise click.UsageError(f"{version!r} is not NAME@VERSION")
    with api() as server:
        _point(server, name, alias, int(number), tenant)


@adapter_group.command("rollback")
@click.argument("name")
@click.option("--alias", default="prod", show_default=True)
@tenant_option
def rollback(name: str, alias: str, tenant: str | None) -> None:
    """Point an alias to where it pointed before its last move."""
    with api() as server:
        found = server.get(f"/admin/v1/adapters/{name}/aliases/{alias}", tenant=tenant)
        previous = found["history"][0]["previous"]
        if previous is None:
            raise click.ClickException(f"{name}@{alias} never pointed to another version")
        _point(server, name, alias, previous, tenant)


@adapter_group.command("delete")
@click.argument("name")
@tenant_option
@click.confirmation_option(prompt="Delete it?")
def delete(name: str, tenant: str | None) -> None:
    """Delete an adapter, or one version given as NAME@VERSION."""
    adapter, at, version = name.partition("@")
    path = f"/admin/v1/adapters/{adapter}" + (f"/versions/{version}" if at else "")
    with api() as server:
        server.delete(path, tenant=tenant)
    click.echo(f"deleted {name}")


def _point(server: Any, name: str, alias: str, version: int, tenant: str | None) -> None:
    path = f"/admin/v1/adapters/{name}/aliases/{alias}"
    server.put(path, {"version": version}, tenant=tenant)
    click.echo(f"{name}@{alias} is now version {version}")
