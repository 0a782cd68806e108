"""Command group `loraplex quota`."""

from __future__ import annotations

import re
from typing import Any

import click

from loraplex.api import Api
from loraplex.commands.command import Group
from loraplex.commands.options import F, api, route
from loraplex.output import is_json, show_done, show_list, show_one, tell
from loraplex.settings import parse_size
from loraplex.tables import Column, Dollars, Kind, Row, Size

COLUMNS = (
    Column("name", "limit", Kind.NAME),
    Column("used", "used", Kind.NUMBER),
    Column("limit", "of", Kind.NUMBER),
    Column("left", "left", Kind.NUMBER),
    Column("held", "held", Kind.NUMBER),
    Column("ends_at", "renewed", Kind.AGE),
)
LIMITS = {
    "requests_per_minute": ("NUMBER", "Requests per minute."),
    "tokens_per_minute": ("NUMBER", "Prompt and answer tokens per minute."),
    "concurrent_requests": ("NUMBER", "Requests at the same time."),
    "tokens_per_day": ("NUMBER", "Prompt and answer tokens per day (UTC)."),
    "tokens_per_month": ("NUMBER", "Prompt and answer tokens per month (UTC)."),
    "adapters": ("NUMBER", "Number of adapters of a tenant."),
    "spend_per_day": ("DOLLARS", "Dollars per day (UTC), such as 12.50."),
    "spend_per_month": ("DOLLARS", "Dollars per month (UTC)."),
    "adapter_bytes": ("BYTES", "Bytes of all versions of a tenant, such as 2GiB."),
    "pin_bytes": ("BYTES", "Bytes of adapters that a tenant may pin (default: 0)."),
    "cached_weight": (
        "PERCENT",
        "Percentage of each cached prompt token that counts against token limits (default: 100).",
    ),
    "weight": (
        "NUMBER",
        "Scheduling weight of a tenant when workers are busy, 1 to 1000 (default: 1).",
    ),
    "class": (
        "CLASS",
        "Class of a tenant: interactive, standard or batch (default: standard).",
    ),
}
"""Kind of value and description of each limit."""
CLASS_NAMES = ("interactive", "standard", "batch")
NONE = "none"


@click.group("quota", cls=Group)
def quota_group() -> None:
    """Limits of tenants and of their keys, and how much of them is used."""


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def whose_options(command: F) -> F:
    command = click.option("--key", metavar="ID", help="Apply to this key.")(command)
    return click.option("--tenant", help="Apply to this tenant as a whole.")(command)


def limit_options(command: F) -> F:
    for name, (kind, text) in reversed(LIMITS.items()):
        choice = click.Choice([*CLASS_NAMES, NONE]) if kind == "CLASS" else None
        option = click.option(_option(name), metavar=kind, type=choice, help=text)
        command = option(command)
    return command


@quota_group.command("show", example="--tenant acme")
@whose_options
def show_quota(tenant: str | None, key: str | None) -> None:
    """Show the limits and their current use. A tenant's own key needs neither --tenant nor
    --key."""
    _show(api().get(route("quota") if tenant is key is None else _path(tenant, key)))


@quota_group.command("set", example="--tenant acme --requests-per-minute 60 --spend-per-month 250")
@whose_options
@limit_options
def set_quota(tenant: str | None, key: str | None, **given: str | None) -> None:
    """Change some limits; 'none' removes one. The others are kept."""
    changes = {name: _value(name, text) for name, text in given.items() if text is not None}
    if not changes:
        raise click.UsageError("give a limit to set, such as --requests-per-minute 60")
    path, server = _path(tenant, key), api()
    present, etag = server.get_tagged(path)
    limits = {name: present[name] for name in LIMITS if name in present} | changes
    body = {name: limit for name, limit in limits.items() if limit is not None}
    changed = server.put(path, body, if_match=etag)
    if any(limit is not None and LIMITS[name][0] == "DOLLARS" for name, limit in changes.items()):
        _warn_of_prices(server)
    _show(changed)


@quota_group.command("clear", example="--tenant acme")
@whose_options
def clear_quota(tenant: str | None, key: str | None) -> None:
    """Remove all limits. Nothing may be pinned afterwards."""
    cleared = api().delete(_path(tenant, key))
    show_done(cleared, f"{cleared['id']} has no limits")


def _warn_of_prices(server: Api) -> None:
    """Warns if models have no price, because they are free and no spend limit applies to them."""
    priced = {price["model"] for price in server.all("/admin/v1/prices", cursor="model")}
    free = [m["name"] for m in server.all("/admin/v1/models") if m["name"] not in priced]
    if free:
        tell(
            f"warning: no price is set for {', '.join(free)}, so that spend limits do not count its"
            " use; `loraplex price set` sets one"
        )


def _path(tenant: str | None, key: str | None) -> str:
    match tenant, key:
        case str(), None:
            return route("tenants", tenant, "quota")
        case None, str():
            return route("keys", key, "quota")
        case _:
            raise click.UsageError("give --tenant or --key")


def _value(name: str, text: str) -> int | str | None:
    """Returns the value of a limit. Raises UsageError if the text is invalid."""
    if text == NONE:
        return None
    match LIMITS[name][0]:
        case "DOLLARS" | "CLASS":
            return text
        case "BYTES":
            try:
                return parse_size(text)
            except ValueError as error:
                raise click.UsageError(f"{_option(name)}: {error}") from error
        case _:
            if not re.fullmatch(r"-?[0-9]+", text):
                raise click.UsageError(
                    f"{_option(name)}: {text!r} is neither a whole number nor '{NONE}'"
                )
            return int(text)


def _row(name: str, use: dict[str, Any]) -> Row:
    kind = {"BYTES": Size, "DOLLARS": Dollars}.get(LIMITS[name][0])
    if kind is not None:
        use = use | {part: kind(use[part]) for part in ("limit", "used", "held", "left")}
    return {"name": name} | use


def _show(quota: dict[str, Any]) -> None:
    if is_json():
        show_one(quota)
        return
    # The use of these two is also reported for tenants without limits, because they have defaults.
    is_unset = not quota.get("pin_bytes") and quota.get("adapter_bytes") is None
    if quota["use"].keys() <= {"pin_bytes", "adapter_bytes"} and is_unset:
        tell("no limits are set; `loraplex quota set` sets some")
    show_list([_row(name, use) for name, use in quota["use"].items()], COLUMNS)
    if quota.get("cached_weight", 100) != 100:
        click.echo(f"A cached prompt token counts as {quota['cached_weight']} % of a token.")
    if (quota.get("weight", 1), quota.get("class", "standard")) != (1, "standard"):
        click.echo(f"Requests are of class {quota['class']} and weight {quota['weight']}.")
