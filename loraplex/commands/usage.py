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
@click.option("--since", help="Such as 24h, 30d or 2027-01-31; default: 7 days before the end.")
@click.option("--end", help="Before when, written the same way; default: now.")
@click.option("--bucket", type=click.Choice(["1h", "1d"]), default="1d", show_default=True)
@click.option(
    "--group-by",
    default="tenant,model,adapter",
    show_default=True,
    help="Some of tenant, model, adapter, adapter_version, key.",
)
@json_option
def usage_command(
    tenant: str | None,
    since: str | None,
    end: str | None,
    bucket: str,
    group_by: str,
    as_json: bool,
) -> None:
    """Show what was used: requests, tokens and dollars by time."""
    start, before = _moment(since), _moment(end)
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
    asked = [name.strip() for name in group_by.split(",")]
    told = [name for name in DIMENSIONS if name in asked]
    show(rows, ("start", *told, *NUMBERS), as_json)


def _moment(text: str | None) -> str | None:
    """As the server reads it. Raises UsageError."""
    if text is None:
        return None
    ago = _AGO.fullmatch(text)
    if ago is not None:
        unit = timedelta(hours=1) if ago[2] == "h" else timedelta(days=1)
        moment = datetime.now(UTC) - int(ago[1]) * unit
    else:
        try:
            moment = datetime.fromisoformat(text)
            moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            raise click.UsageError(f"{text!r} is neither 24h, 30d nor a date") from error
    return moment.isoformat().replace("+00:00", "Z")
