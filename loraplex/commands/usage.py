"""`loraplex usage`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from loraplex.commands.options import api, json_option, tenant_option
from loraplex.output import show

NUMBERS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
DIMENSIONS = ("tenant", "model", "adapter", "adapter_version", "key")

_AGO = re.compile(r"(\d{1,5})([hd])")


@click.command("usage")
@tenant_option
@click.option("--since", default="7d", show_default=True, help="Such as 24h, 30d or 2027-01-31.")
@click.option("--bucket", type=click.Choice(["1h", "1d"]), default="1d", show_default=True)
@click.option(
    "--group-by",
    default="tenant,model,adapter",
    show_default=True,
    help="Some of tenant, model, adapter, adapter_version, key.",
)
@json_option
def usage_command(
    tenant: str | None, since: str, bucket: str, group_by: str, as_json: bool
) -> None:
    """Show what was used: requests, tokens and dollars by time."""
    start = _start(since)
    rows: list[dict[str, Any]] = []
    after = None
    with api() as server:
        while True:
            page = server.get(
                "/admin/v1/usage",
                tenant=tenant,
                start=start.isoformat().replace("+00:00", "Z"),
                bucket=bucket,
                group_by=group_by,
                after=after,
            )
            rows += page["data"]
            after = page["after"]
            if after is None:
                break
    told = [name for name in DIMENSIONS if name in group_by.split(",")]
    show(rows, ("start", *told, *NUMBERS), as_json)


def _start(since: str) -> datetime:
    """Raises UsageError."""
    ago = _AGO.fullmatch(since)
    if ago is not None:
        unit = timedelta(hours=1) if ago[2] == "h" else timedelta(days=1)
        return datetime.now(UTC) - int(ago[1]) * unit
    try:
        moment = datetime.fromisoformat(since)
    except ValueError as error:
        raise click.UsageError(f"{since!r} is neither 24h, 30d nor a date") from error
    return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
