"""`loraplex adapter`."""

from __future__ import annotations

from typing import Any

import click

from loraplex.commands.options import api, from_json, json_option, pairs, route, tenant_option
from loraplex.commands.push import push_command
from loraplex.output import show

ADAPTERS = ("name", "tenant", "states", "aliases", "created_at")
VERSIONS = (
    "version",
    "state",
    "model",
    "max_rank",
    "file_bytes",
    "aliases",
    "created_at",
    "detail",
)
REJECTED = ("name", "code", "field", "got", "hint", "rejected_at")
MOVES = ("changed_at", "reason", "version", "canary", "changed_by", "detail")
PERCENT = click.IntRange(1, 99)

completions_option = click.option(
    "--completions-only",
    is_flag=True,
    help="Also if its chat template is not approved: chats are refused until it is.",
)
alias_option = click.option("--alias", default="prod", show_default=True)


@click.group("adapter")
def adapter_group() -> None:
    """Adapters: immutable versions, and aliases that point to them."""


adapter_group.add_command(push_command)


@adapter_group.command("list")
@tenant_option
@json_option
def list_adapters(tenant: str | None, as_json: bool) -> None:
    """List adapters with their aliases."""
    with api() as server:
        found = server.all("/admin/v1/adapters", tenant=tenant)
    show(found, ADAPTERS, as_json)


@adapter_group.command("show")
@click.argument("name")
@click.option("--verify", is_flag=True, help="Read every byte that the store has of NAME@VERSION.")
@tenant_option
@json_option
def show_adapter(name: str, verify: bool, tenant: str | None, as_json: bool) -> None:
    """Show an adapter's versions, or all of one version given as NAME@VERSION."""
    if verify and "@" not in name:
        raise click.UsageError("--verify takes NAME@VERSION")
    with api() as server:
        found = server.get(_path(name), tenant=tenant, **({"verify": True} if verify else {}))
    if as_json:
        show([found], (), as_json)
    elif "versions" in found:
        rows = [version | {"detail": _detail(version)} for version in found["versions"]]
        show(rows, VERSIONS, as_json, title=name)
    else:
        rows = [{"field": field, "value": value} for field, value in found.items()]
        show(rows, ("field", "value"), as_json, title=name)


@adapter_group.command("rejected")
@tenant_option
@json_option
def list_rejected(tenant: str | None, as_json: bool) -> None:
    """List uploads that were refused, newest first, and why."""
    with api() as server:
        found = server.get(route("uploads", "rejected"), tenant=tenant)["data"]
    rows = found if as_json else [rejected | rejected["error"] for rejected in found]
    show(rows, REJECTED, as_json)


@adapter_group.command("history")
@click.argument("name")
@alias_option
@tenant_option
@json_option
def history(name: str, alias: str, tenant: str | None, as_json: bool) -> None:
    """Show an alias's moves, newest first."""
    with api() as server:
        found = server.get(_alias_path(name, alias), tenant=tenant)
    show(found["history"], MOVES, as_json, title=f"{name}@{alias}")


@adapter_group.command("promote")
@click.argument("version", metavar="NAME@VERSION")
@alias_option
@completions_option
@tenant_option
def promote(version: str, alias: str, completions_only: bool, tenant: str | None) -> None:
    """Point an alias to a version."""
    name, number = _parse_version(version)
    with api() as server:
        body = {"version": number, "completions_only": completions_only}
        _tell(server.put(_alias_path(name, alias), body, tenant=tenant))


@adapter_group.command("canary")
@click.argument("version", metavar="NAME@VERSION")
@click.option("--weight", type=PERCENT, help="Percent of the requests that the version gets.")
@click.option("--stop", is_flag=True, help="All requests to the stable version again; give NAME.")
@click.option(
    "--policy",
    multiple=True,
    metavar="KEY=VALUE",
    help="When it goes back by itself: window_s, min_requests, max_error_rate, max_ttft_ratio;"
    " or none: never.",
)
@alias_option
@completions_option
@tenant_option
def canary(
    version: str,
    weight: int | None,
    stop: bool,
    policy: tuple[str, ...],
    alias: str,
    completions_only: bool,
    tenant: str | None,
) -> None:
    """Give some of an alias's requests to another version."""
    name, at, _ = version.partition("@")
    if stop == (weight is not None) or (stop and (at or policy)):
        raise click.UsageError("give --weight and NAME@VERSION, or --stop and NAME")
    chosen = _policy(policy)
    with api() as server:
        path = _alias_path(name, alias)
        found, etag = server.get_tagged(path, tenant=tenant)
        stable = found["version"]
        if weight is None:
            body: dict[str, Any] = {"version": stable}
        else:
            number = _parse_version(version)[1]
            if number == stable:
                raise click.UsageError(f"{name}@{alias} is version {stable} already")
            body = {"canary": {stable: 100 - weight, number: weight}} | chosen
            body["completions_only"] = completions_only
        _tell(server.put(path, body, if_match=etag, tenant=tenant))


@adapter_group.command("rollback")
@click.argument("name")
@alias_option
@tenant_option
def rollback(name: str, alias: str, tenant: str | None) -> None:
    """Undo an alias's last move: back to the version or canary set before it."""
    with api() as server:
        _tell(server.post(f"{_alias_path(name, alias)}/rollback", tenant=tenant))


@adapter_group.command("pin")
@click.argument("name")
@alias_option
@tenant_option
def pin(name: str, alias: str, tenant: str | None) -> None:
    """Keep what an alias points to on the device, within the tenant's quota."""
    with api() as server:
        _tell(server.put(f"{_alias_path(name, alias)}/pin", {}, tenant=tenant))


@adapter_group.command("unpin")
@click.argument("name")
@alias_option
@tenant_option
def unpin(name: str, alias: str, tenant: str | None) -> None:
    """Let what an alias points to leave the device."""
    with api() as server:
        _tell(server.delete(f"{_alias_path(name, alias)}/pin", tenant=tenant))


@adapter_group.command("approve")
@click.argument("version", metavar="NAME@VERSION")
@tenant_option
def approve(version: str, tenant: str | None) -> None:
    """Let a version's chat template run (admin keys only)."""
    _parse_version(version)
    with api() as server:
        made = server.post(f"{_path(version)}/template/approve", tenant=tenant)
    click.echo(f"approved the chat template {made['serving']['template']['digest'][:12]}")


@adapter_group.command("delete")
@click.argument("name")
@tenant_option
@click.confirmation_option(prompt="Delete it?")
def delete(name: str, tenant: str | None) -> None:
    """Delete an adapter, or one version given as NAME@VERSION. Requests that run go on."""
    with api() as server:
        gone = server.delete(_path(name), tenant=tenant)
    in_flight = gone["in_flight"]
    click.echo(f"deleted {name}" + (f", {in_flight} requests in flight" if in_flight else ""))


def _path(name: str) -> str:
    """Of NAME or NAME@VERSION."""
    if "@" not in name:
        return route("adapters", name)
    adapter, number = _parse_version(name)
    return route("adapters", adapter, "versions", str(number))


def _alias_path(name: str, alias: str) -> str:
    return route("adapters", name, "aliases", alias)


def _parse_version(text: str) -> tuple[str, int]:
    name, _, number = text.partition("@")
    if not (number.isascii() and number.isdigit()):
        raise click.UsageError(f"{text!r} is not NAME@VERSION")
    return name, int(number)


def _policy(given: tuple[str, ...]) -> dict[str, Any]:
    """The field `policy`, left out for the server's default."""
    if not given:
        return {}
    if given == ("none",):
        return {"policy": None}
    try:
        return {"policy": {key: from_json(value) for key, value in pairs(given).items()}}
    except ValueError as error:
        raise click.UsageError(f"--policy takes numbers: {error}") from error


def _tell(alias: dict[str, Any]) -> None:
    """Where it points now."""
    name, canary = f"{alias['name']}@{alias['alias']}", alias["canary"]
    pinned = ", pinned" if alias["pinned"] else ""
    if canary is None:
        click.echo(f"{name} is now version {alias['version']}{pinned}")
        return
    total = sum(canary.values())
    parts = [f"{100 * weight / total:.4g} % version {v}" for v, weight in canary.items()]
    click.echo(f"{name} is now {', '.join(parts)}{pinned}")


def _detail(version: dict[str, Any]) -> str:
    """What keeps it from being served, in a few words."""
    if version["error"]:
        return version["error"]["code"]
    if version["proving"]:
        return version["proving"]["detail"]
    if version["state"] == "awaiting_approval":
        return "its chat template is not approved"
    return ", ".join(f"{fault['worker']}: {fault['code']}" for fault in version["faults"])
