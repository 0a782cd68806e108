"""Command group `loraplex usage`."""

from __future__ import annotations

import secrets
from typing import Any

import click

from loraplex.commands.command import Group
from loraplex.commands.options import api, moment, route, tenant_option
from loraplex.commands.prices import dollars_options
from loraplex.output import show_list, show_one
from loraplex.tables import Column, Kind

START = {"1d": Column("start", "day", Kind.DAY), "1h": Column("start", "hour", Kind.HOUR)}
COLUMNS = (
    Column("tenant_name", "tenant", Kind.NAME),
    Column("adapter", "adapter", Kind.NAME),
    Column("adapter_version", "version", Kind.NUMBER),
    Column("requests", "requests", Kind.NUMBER),
    Column("prompt_tokens", "prompt", Kind.NUMBER),
    Column("completion_tokens", "completion", Kind.NUMBER),
    Column("cost", "cost", Kind.DOLLARS),
    Column("credited", "credited", Kind.DOLLARS),
    Column("model", "model", Kind.NAME),
    Column("key", "key", Kind.ID),
    Column("cached_tokens", "cached", Kind.NUMBER),
)
DIMENSIONS = ("tenant", "model", "adapter", "adapter_version", "key")
EXAMPLE = """smollm2-135m-instruct --input 0.20 --output 0.60 \\
    --since 2027-01-04T09:00 --end 2027-01-04T14:00 --reason "20.00 was set in place of 0.20\""""
CREDITS = (
    Column("id", "credit", Kind.ID),
    Column("since", "since", Kind.HOUR),
    Column("cost_before", "before", Kind.DOLLARS),
    Column("cost_after", "after", Kind.DOLLARS),
    Column("reason", "reason", Kind.PROSE),
    Column("model", "model", Kind.NAME),
    Column("tenant_id", "tenant", Kind.ID),
    Column("until", "until", Kind.HOUR),
)


@click.group(
    "usage",
    cls=Group,
    invoke_without_command=True,
    example="--since 30d --group-by tenant,model",
    output="table",
)
@tenant_option
@click.option(
    "--since", help="Start, such as 24h, 30d or 2027-01-31 (default: 7 days before the end)."
)
@click.option("--end", help="End, in the same form (default: now).")
@click.option(
    "--bucket",
    type=click.Choice(["1h", "1d"]),
    default="1d",
    show_default=True,
    help="Time that a row sums up: an hour or a day (UTC).",
)
@click.option(
    "--group-by",
    default="tenant,model,adapter",
    show_default=True,
    help="Comma-separated: tenant, model, adapter, adapter_version, key.",
)
@click.pass_context
def usage_group(
    context: click.Context,
    tenant: str | None,
    since: str | None,
    end: str | None,
    bucket: str,
    group_by: str,
) -> None:
    """Show usage over time: requests, tokens and dollars.

    `loraplex usage credit` corrects a wrong price.
    """
    if context.invoked_subcommand is not None:
        return
    start, before = (text and moment(text) for text in (since, end))
    asked = [name.strip() for name in group_by.split(",")]
    for name in asked:
        if name not in DIMENSIONS:
            raise click.UsageError(f"--group-by: {name!r} is not one of {', '.join(DIMENSIONS)}")
    period = {"start": start, "end": before, "bucket": bucket}
    query: dict[str, Any] = {"tenant": tenant, "group_by": group_by, **period}
    rows = api().all("/admin/v1/usage", **query)
    hidden = {
        "tenant_name" if name == "tenant" else name for name in DIMENSIONS if name not in asked
    }
    if not any(float(row["credited"]) for row in rows):
        hidden.add("credited")
    shown = [column for column in COLUMNS if column.key not in hidden]
    show_list(rows, (START[bucket], *shown))


@usage_group.command("credit", example=EXAMPLE)
@click.argument("model")
@dollars_options
@click.option("--since", required=True, help="Start, such as 24h or 2027-01-31T09:00 (UTC).")
@click.option("--end", help="End, in the same form (default: now).")
@click.option("--tenant", help="Tenant name or id (default: all tenants).")
@click.option("--reason", required=True, help="Reason, which the audit log keeps.")
@click.option(
    "--id",
    "credit_id",
    help="Id, so that a repeated command changes nothing (default: a new one).",
)
def make_credit(
    model: str, since: str, end: str | None, credit_id: str | None, **fields: str | None
) -> None:
    """Correct a wrong price in recorded usage. The options have the right price.

    Sets the costs of the whole hours from --since to --end to those of the given prices. It never
    raises a cost. Spend limits count the corrected costs.
    """
    body = {"model": model, "start": moment(since), "end": moment(end or "0h"), **fields}
    name = credit_id or f"credit-{secrets.token_hex(6)}"
    show_one(api().put(route("usage", "credits", name), body), {"created_at": Kind.AGE})


@usage_group.command("credits", example="", output="table")
def list_credits() -> None:
    """List the credits that corrected usage billed at a wrong price."""
    show_list(api().all("/admin/v1/usage/credits", cursor="id"), CREDITS)
