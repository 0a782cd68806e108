"""Command group `loraplex adapter`."""

from __future__ import annotations

from typing import Any

import click

from loraplex.commands.command import Group
from loraplex.commands.options import (
    F,
    api,
    confirm,
    from_json,
    pairs,
    route,
    tenant_option,
    yes_option,
)
from loraplex.commands.push import push_command
from loraplex.output import is_json, show_done, show_list, show_one
from loraplex.tables import Column, Kind, Row

ADAPTERS = (
    Column("name", "name", Kind.NAME),
    Column("tenant", "tenant", Kind.NAME),
    Column("serves", "serves", Kind.PROSE),
    Column("state", "state", Kind.WORD),
    Column("on", "on", Kind.PROSE),
    Column("states", "versions", Kind.PROSE),
    Column("created_at", "created", Kind.AGE),
)
VERSIONS = (
    Column("version", "version", Kind.NUMBER),
    Column("state", "state", Kind.WORD),
    Column("detail", "detail", Kind.PROSE),
    Column("served", "serves"),
    Column("on", "on", Kind.PROSE),
    Column("model", "model", Kind.NAME),
    Column("max_rank", "rank", Kind.NUMBER),
    Column("file_bytes", "size", Kind.SIZE),
    Column("created_at", "created", Kind.AGE),
    Column("signed_by", "signed by", Kind.ID),
    Column("signing_key_revoked_at", "key revoked", Kind.AGE),
    Column("template", "template", Kind.WORD),
    Column("digest", "digest", Kind.ID),
)
REJECTED = (
    Column("name", "name", Kind.NAME),
    Column("code", "code"),
    Column("hint", "hint", Kind.PROSE),
    Column("rejected_at", "when", Kind.AGE),
    Column("field", "field"),
    Column("got", "got"),
)
MOVES = (
    Column("changed_at", "when", Kind.AGE),
    Column("reason", "reason", Kind.WORD),
    Column("version", "version", Kind.NUMBER),
    Column("canary", "canary"),
    Column("detail", "detail", Kind.PROSE),
    Column("changed_by", "key", Kind.ID),
)
KINDS = {
    "file_bytes": Kind.SIZE,
    "created_at": Kind.AGE,
    "retired_at": Kind.AGE,
    "signing_key_revoked_at": Kind.AGE,
}
PERCENT = click.IntRange(1, 99)

completions_option = click.option(
    "--completions-only",
    is_flag=True,
    help="Accept a version whose chat template is not approved yet; chats are refused until it is.",
)
alias_option = click.option(
    "--alias", default="prod", show_default=True, help="Alias of the adapter."
)


def on_alias(command: F) -> F:
    """Adds to a command the arguments and options that select an adapter's alias."""
    return click.argument("name")(alias_option(tenant_option(command)))


@click.group("adapter", cls=Group)
def adapter_group() -> None:
    """Adapters: immutable versions, and aliases that point to them."""


adapter_group.add_command(push_command)


@adapter_group.command("list", example="--tenant acme", output="table")
@tenant_option
def list_adapters(tenant: str | None) -> None:
    """List adapters and their aliases. An admin key lists those of all tenants."""
    found = api().all("/admin/v1/adapters", cursor=("tenant", "name"), tenant=tenant)
    if not is_json():
        found = [adapter | _summary(adapter) for adapter in found]
    show_list(found, ADAPTERS)


@adapter_group.command("show", example="support-bot --tenant acme")
@click.argument("name")
@click.option(
    "--verify", is_flag=True, help="Read all files of NAME@VERSION in the store and check them."
)
@tenant_option
def show_adapter(name: str, verify: bool, tenant: str | None) -> None:
    """Show an adapter's versions, or one version given as NAME@VERSION."""
    if verify and "@" not in name:
        raise click.UsageError("--verify needs NAME@VERSION")
    found = api().get(_path(name), tenant=tenant, verify=True if verify else None)
    if is_json() or "versions" not in found:
        show_one(found, KINDS)
        return
    show_one(
        {
            "name": found["name"],
            "tenant": found["tenant"],
            "serves": _pointers(found),
            "created_at": found["created_at"],
        },
        KINDS,
    )
    click.echo()
    show_list([version | _version(version) for version in found["versions"]], VERSIONS)


@adapter_group.command("rejected", example="--tenant acme", output="table")
@tenant_option
def list_rejected(tenant: str | None) -> None:
    """List refused uploads and the reasons, newest first."""
    found = api().get(route("uploads", "rejected"), tenant=tenant)["data"]
    rows = found if is_json() else [rejected | rejected["error"] for rejected in found]
    show_list(rows, REJECTED)


@adapter_group.command("history", example="support-bot --tenant acme", output="table")
@click.argument("name")
@alias_option
@tenant_option
def history(name: str, alias: str, tenant: str | None) -> None:
    """Show the history of an alias, newest first."""
    show_list(api().get(_alias_path(name, alias), tenant=tenant)["history"], MOVES)


@adapter_group.command("promote", example="support-bot@2 --tenant acme")
@click.argument("version", metavar="NAME@VERSION")
@alias_option
@completions_option
@tenant_option
def promote(version: str, alias: str, completions_only: bool, tenant: str | None) -> None:
    """Point an alias to a version."""
    name, number = _parse_version(version)
    body = {"version": number, "completions_only": completions_only}
    _print_alias(api().put(_alias_path(name, alias), body, tenant=tenant))


@adapter_group.command("canary", example="support-bot@2 --weight 10 --tenant acme")
@click.argument("version", metavar="NAME@VERSION")
@click.option("--weight", type=PERCENT, help="Percentage of the requests that the version gets.")
@click.option("--stop", is_flag=True, help="Stop the canary; pass NAME instead of NAME@VERSION.")
@click.option(
    "--policy",
    multiple=True,
    metavar="KEY=VALUE",
    help="Number of the rollback policy: window_s, min_requests, max_error_rate or"
    " max_ttft_ratio. 'none' disables automatic rollback.",
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
    """Send a part of an alias's requests to another version."""
    name, at, _ = version.partition("@")
    if stop == (weight is not None) or (stop and (at or policy)):
        raise click.UsageError("give --weight and NAME@VERSION, or --stop and NAME")
    chosen, path, server = _policy(policy), _alias_path(name, alias), api()
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
    _print_alias(server.put(path, body, if_match=etag, tenant=tenant))


@adapter_group.command("rollback", example="support-bot --tenant acme")
@on_alias
def rollback(name: str, alias: str, tenant: str | None) -> None:
    """Undo the last change of an alias: restore its previous version or canary."""
    _print_alias(api().post(f"{_alias_path(name, alias)}/rollback", tenant=tenant))


@adapter_group.command("pin", example="support-bot --tenant acme")
@on_alias
def pin(name: str, alias: str, tenant: str | None) -> None:
    """Keep an alias's version on the device, within the tenant's quota."""
    _print_alias(api().put(f"{_alias_path(name, alias)}/pin", {}, tenant=tenant))


@adapter_group.command("unpin", example="support-bot --tenant acme")
@on_alias
def unpin(name: str, alias: str, tenant: str | None) -> None:
    """Allow an alias's version to be evicted from the device."""
    _print_alias(api().delete(f"{_alias_path(name, alias)}/pin", tenant=tenant))


@adapter_group.command("unalias", example="support-bot@staging --tenant acme")
@click.argument("pointer", metavar="NAME@ALIAS")
@tenant_option
@yes_option
def unalias(pointer: str, tenant: str | None, yes: bool) -> None:
    """Delete an alias, such as support-bot@staging. Its version is kept."""
    name, _, alias = pointer.partition("@")
    if not (name and alias):
        raise click.UsageError(f"{pointer!r} is not NAME@ALIAS")
    confirm(f"Delete the alias {pointer}? Requests for it will be refused.", yes)
    gone = api().delete(_alias_path(name, alias), tenant=tenant)
    show_done(gone, f"deleted the alias {pointer}")


@adapter_group.command("approve", example="support-bot@2 --tenant acme")
@click.argument("version", metavar="NAME@VERSION")
@tenant_option
def approve(version: str, tenant: str | None) -> None:
    """Let a version's chat template run (admin keys only)."""
    _parse_version(version)
    made = api().post(f"{_path(version)}/template/approve", tenant=tenant)
    digest = made["serving"]["template"]["digest"]
    show_done(made, f"approved the chat template {digest[:12]}")


@adapter_group.command("delete", example="support-bot@1 --tenant acme --yes")
@click.argument("name")
@tenant_option
@yes_option
def delete(name: str, tenant: str | None, yes: bool) -> None:
    """Delete an adapter, or one version given as NAME@VERSION. Running requests continue."""
    server = api()
    if not yes:
        confirm(_question(name, server.get(_path(name), tenant=tenant), tenant), yes)
    gone = server.delete(_path(name), tenant=tenant)
    in_flight = gone["in_flight"]
    told = f"deleted {name}" + (f", {in_flight} requests in flight" if in_flight else "")
    show_done(gone, told)


def _question(name: str, found: Row, tenant: str | None) -> str:
    """Returns a question that names everything that would be deleted. `found` is the adapter or
    version."""
    owner = found.get("tenant") or tenant
    of = f" of tenant {owner}" if owner else ""
    if "versions" not in found:
        return f"Delete version {name}{of}?"
    number = sum(version["state"] != "retired" for version in found["versions"])
    aliases = ", ".join(found["aliases"]) or "none"
    return f"Delete adapter {name}{of} with its versions ({number}) and aliases ({aliases})?"


def _path(name: str) -> str:
    """Returns the route of NAME or NAME@VERSION."""
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
    """Returns a request's field `policy`, or no field if the server's default policy applies."""
    if not given:
        return {}
    if given == ("none",):
        return {"policy": None}
    try:
        return {
            "policy": {key: from_json(value) for key, value in pairs("--policy", given).items()}
        }
    except ValueError as error:
        raise click.UsageError(f"--policy takes numbers: {error}") from error


def _print_alias(alias: Row) -> None:
    """Prints what an alias points to."""
    name, canary = f"{alias['name']}@{alias['alias']}", alias["canary"]
    pinned = ", pinned" if alias["pinned"] else ""
    points = f"version {alias['version']}"
    if canary is not None:
        points = ", ".join(f"{part} version {v}" for v, part in _percent(canary).items())
    show_done(alias, f"{name} is now {points}{pinned}")


def _percent(canary: dict[str, int]) -> dict[str, str]:
    total = sum(canary.values())
    return {version: f"{100 * weight / total:.4g} %" for version, weight in canary.items()}


def _summary(adapter: Row) -> Row:
    """Returns an adapter's computed values for a row of the list of adapters."""
    tiers = [f"{tier['worker']} {tier['tier']} @{tier['version']}" for tier in adapter["tiers"]]
    return {
        "serves": _pointers(adapter),
        "state": adapter["last_state"],
        "on": tiers,
        "states": dict(sorted(adapter["states"].items())),
    }


def _pointers(adapter: Row) -> str:
    """Returns a text with each alias and its version. Includes the shares of the alias's canary,
    and whether the alias is pinned."""
    parts: list[str] = []
    for alias, version in adapter["aliases"].items():
        points = f"{alias}={version}"
        if canary := adapter["canaries"].get(alias):
            split = " / ".join(f"{part} @{number}" for number, part in _percent(canary).items())
            points += f" ({split})"
        parts.append(points + (" pinned" if alias in adapter["pinned"] else ""))
    return ", ".join(parts)


def _version(version: Row) -> Row:
    """Returns a version's computed values for a row of the table of versions."""
    template = version["serving"]["template"]
    return {
        "served": version["aliases"],
        "detail": _detail(version),
        "on": [f"{tier['worker']} {tier['tier']}" for tier in version["tiers"]],
        "template": template and ("approved" if template["approved"] else "not approved"),
    }


def _detail(version: dict[str, Any]) -> str:
    """Returns a short text about a version's problem: its error, the state of its verification, a
    missing approval, or its faults on workers. Returns an empty text if there is none."""
    if version["error"]:
        return version["error"]["code"]
    if version["proving"]:
        return version["proving"]["detail"]
    if version["state"] == "awaiting_approval":
        return "its chat template is not approved"
    return ", ".join(f"{fault['worker']}: {fault['code']}" for fault in version["faults"])
