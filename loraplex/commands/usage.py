"""`loraplex usage`."""

from __future__ import annotations

from typing import Any

import click

from loraplex.commands.options import api, list_options, moment, tenant_option
from loraplex.output import show_list
from loraplex.tables import Column, Kind

START = {"1d": Column("start", "day", Kind.DAY), "1h": Column("start", "hour", Kind.HOUR)}
COLUMNS = (
    Column("tenant_name", "tenant", Kind.NAME),
    Column("adapter", "adapter", Kind.NAME),
    Column("adapter_version", "version", Kind.NUMBER),
    Column("requests", "requests", Kind.NUMBER),
    Column("prompt_tokens", "prompt", Kind.NUMBER),
    Column("completion_tokens", "completion", Kind.NUMBER),
    Column("cost", "cost", Kind.NUMBER),
    Column("model", "model", Kind.NAME),
    Column("key", "key", Kind.ID),
    Column("cached_tokens", "cached", Kind.NUMBER),
)
DIMENSIONS = ("tenant", "model", "adapter", "adapter_version", "key")


@click.command("usage")
@tenant_option
@click.option(
    "--since", help="Start, such as 24h, 30d or 2027-01-31 (default: 7 days before the end)."
)
@click.option("--end", help="End, in the same form (default: now).")
@click.option("--bucket", type=click.Choice(["1h", "1d"]), default="1d", show_default=True)
@click.option(
    "--group-by",
    default="tenant,model,adapter",
    show_default=True,
    help="Comma-separated: tenant, model, adapter, adapter_version, key.",
)
@list_options
def usage_command(
    tenant: str | None,
    since: str | None,
    end: str | None,
    bucket: str,
    group_by: str,
) -> None:
    """Show usage over time: requests, tokens and dollars."""
    start, before = (text and moment(text) for text in (since, end))
    asked = [name.strip() for name in group_by.split(",")]
    for name in asked:
        if name not in DIMENSIONS:
            raise click.UsageError(f"--group-by: {name!r} is not one of {', '.join(DIMENSIONS)}")
    rows: list[dict[str, Any]] = []
    after = None
    with api() as server:
        while True:
            page = server.get(
                "/admin/v1/usage",
                tenant=tenant,
                start=start,
                end=before,
                bucket=bucket,
                group_by=group_by,
                after=after,
            )
            rows += page["data"]
            after = page["after"]
            if after is None:
                break
    hidden = {
        "tenant_name" if name == "tenant" else name for name in DIMENSIONS if name not in asked
    }
    told = [column for column in COLUMNS if column.key not in hidden]
    show_list(rows, (START[bucket], *told))
