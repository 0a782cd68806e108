"""Command group `loraplex quota`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from loraplex.api import Api
from loraplex.commands.options import api, json_option, route
from loraplex.output import is_json, show_done, show_list, show_one, tell
from loraplex.settings import parse_size
from loraplex.tables import Column, Kind, Row, Size

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS = (
    Column("name", "limit", Kind.NAME),
    Column("used", "used", Kind.NUMBER),
    Column("limit", "of", Kind.NUMBER),
    Column("left", "left", Kind.NUMBER),
    Column("held", "held", Kind.NUMBER),
    Column("ends_at", "renewed", Kind.AGE),
)
COUNTS = {
    "requests_per_minute": "Requests per minute.",
    "tokens_per_minute": "Prompt and answer tokens per minute.",
    "concurrent_requests": "Requests at the same time.",
    "tokens_per_day": "Prompt and answer tokens per day (UTC).",
    "tokens_per_month": "Prompt and answer tokens per month (UTC).",
    "adapters": "Number of adapters of a tenant.",
}
DOLLARS = {
    "spend_per_day": "Dollars per day (UTC), such as 12.50.",
    "spend_per_month": "Dollars per month (UTC).",
}
BYTES = {
    "adapter_bytes": "Bytes of all versions of a tenant, such as 2GiB.",
    "pin_bytes": "Bytes of adapters that a tenant may pin.",
}
WEIGHTS = {
    "cached_weight": "Percentage of each cached prompt token that counts against token limits."
}
SHARES = {"weight": "Scheduling weight of a tenant when workers are busy, 1 to 1000."}
CLASSES = {"class": "Class of a tenant: interactive, standard or batch."}
CLASS_NAMES = ("interactive", "standard", "batch")
LIMITS = (*COUNTS, *DOLLARS, *BYTES, *WEIGHTS, *SHARES, *CLASSES)
NONE = "none"


@click.group("quota")
def quota_group() -> None:
    """Limits of tenants and of their keys, and how much of them is used."""


def whose_options(command: F) -> F:
    command = click.option("--key", metavar="ID", help="Apply to this key.")(command)
    return click.option("--tenant", help="Apply to this tenant as a whole.")(command)


def limit_options(command: F) -> F:
    groups = (
        *((COUNTS, "NUMBER"), (DOLLARS, "DOLLARS"), (BYTES, "BYTES"), (WEIGHTS, "PERCENT")),
        *((SHARES, "NUMBER"), (CLASSES, "CLASS")),
    )
    options = [(name, metavar, help) for group, metavar in groups for name, help in group.items()]
    for name, metavar, help in reversed(options):
        flag = f"--{name.replace('_', '-')}"
        kind = click.Choice([*CLASS_NAMES, NONE]) if name in CLASSES else None
        command = click.option(flag, metavar=metavar, type=kind, help=help)(command)
    return command


@quota_group.command("show")
@whose_options
@json_option
def show_quota(tenant: str | None, key: str | None) -> None:
    """Show the limits and their current use. A tenant's own key needs neither --tenant nor
    --key."""
    path = route("quota") if tenant is key is None else _path(tenant, key)
    with api() as server:
        _show(server.get(path))


@quota_group.command("set")
@whose_options
@limit_options
@json_option
def set_quota(tenant: str | None, key: str | None, **given: str | None) -> None:
    """Change some limits; 'none' removes one. The others are kept."""
    changes = {name: _value(name, text) for name, text in given.items() if text is not None}
    if not changes:
        raise click.UsageError("give a limit to set, such as --requests-per-minute 60")
    path = _path(tenant, key)
    with api() as server:
        present, etag = server.get_tagged(path)
        limits = {name: present[name] for name in LIMITS if name in present} | changes
        body = {name: limit for name, limit in limits.items() if limit is not None}
        changed = server.put(path, body, if_match=etag)
        if any(changes.get(name) is not None for name in DOLLARS):
            _warn_of_prices(server)
    _show(changed)


@quota_group.command("clear")
@whose_options
@json_option
def clear_quota(tenant: str | None, key: str | None) -> None:
    """Remove all limits. Nothing may be pinned afterwards."""
    with api() as server:
        cleared = server.delete(_path(tenant, key))
    show_done(cleared, f"{cleared['id']} has no limits")


def _warn_of_prices(server: Api) -> None:
    """Warns if models have no price, because they are free and no spend limit applies to them."""
    priced = {price["model"] for price in server.all("/admin/v1/prices", cursor="model")}
    free = [m["name"] for m in server.all("/admin/v1/models") if m["name"] not in priced]
    if free:
        tell(
            f"warning: {', '.join(free)} has no price, so that a spend limit does not count its"
            " use; `loraplex price set` gives it one"
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
    option = f"--{name.replace('_', '-')}"
    try:
        if name in BYTES:
            return parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from error
    if name in DOLLARS or name in CLASSES:
        return text
    if not re.fullmatch(r"-?[0-9]+", text):
        raise click.UsageError(f"{option}: {text!r} is neither a whole number nor '{NONE}'")
    return int(text)


def _row(name: str, use: dict[str, Any]) -> Row:
    if name in BYTES:
        use = use | {part: Size(use[part]) for part in ("limit", "used", "held", "left")}
    return {"name": name} | use


def _show(quota: dict[str, Any]) -> None:
    if is_json():
        show_one(quota)
        return
    # Nothing may be pinned without a limit `pin_bytes`.
    if quota["use"].keys() <= {"pin_bytes"} and not quota.get("pin_bytes"):
        tell("no limits are set; `loraplex quota set` sets some")
    show_list([_row(name, use) for name, use in quota["use"].items()], COLUMNS)
    if quota.get("cached_weight", 100) != 100:
        click.echo(f"A cached prompt token counts {quota['cached_weight']} % of one.")
    if (quota.get("weight", 1), quota.get("class", "standard")) != (1, "standard"):
        click.echo(f"Requests are of class {quota['class']} and weight {quota['weight']}.")
