"""Command group `loraplex audit`."""

from __future__ import annotations

import re
from typing import Any

import click

from loraplex.api import Api
from loraplex.commands.command import Group
from loraplex.commands.options import api, route
from loraplex.errors import LoraplexError
from loraplex.output import print_answer, progress, show_done, show_list
from loraplex.tables import Column, Kind

COLUMNS = (
    Column("seq", "seq", Kind.NUMBER),
    Column("at", "when", Kind.AGE),
    Column("action", "action"),
    Column("object", "object", Kind.ID),
    Column("details", "details", Kind.PROSE),
    Column("key_id", "key", Kind.ID),
    Column("tenant_id", "tenant", Kind.ID),
    Column("address", "address"),
)
ANCHOR = re.compile(r"(\d{1,18}):([0-9a-f]{64})", re.ASCII)


@click.group("audit", cls=Group)
def audit_group() -> None:
    """Log of all changes, each with its key, in a hash chain that reveals rewritten rows."""


@audit_group.command("list", example="--tenant acme --limit 20", output="table")
@click.option(
    "--tenant", help="Only entries of this tenant, by name or id; a deleted tenant has its id."
)
@click.option(
    "--object",
    help="Only entries of this object: id of a tenant or key, NAME@VERSION or NAME@ALIAS.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="Maximum number of entries.",
)
def list_entries(tenant: str | None, object: str | None, limit: int) -> None:
    """List the newest entries."""
    server = api()
    if tenant is not None and not tenant.startswith("ten_"):
        tenant = server.get(route("tenants", tenant))["id"]
    page = server.get("/admin/v1/audit", tenant=tenant, object=object, limit=limit)
    show_list(page["data"], COLUMNS)


@audit_group.command("export", example="--after 1200", output="text")
@click.option(
    "--tenant", help="Only entries of this tenant, by name or id; a deleted tenant has its id."
)
@click.option(
    "--after",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of the entry after which the export begins: the last one that you have.",
)
def export(tenant: str | None, after: int) -> None:
    """Print all entries as lines of JSON, the oldest first.

    An export that breaks goes on with --after and the number `seq` of the last whole line."""
    server = api()
    if tenant is not None and not tenant.startswith("ten_"):
        tenant = server.get(route("tenants", tenant))["id"]
    for line in server.lines("/admin/v1/audit/export", tenant=tenant, after=after):
        print_answer(f"{line}\n")


@audit_group.command("verify", example="")
@click.option(
    "--anchor",
    metavar="SEQ:HASH",
    help="Line that an earlier verify printed. Without it, a log that was cut short or rewritten as"
    " a whole is not noticed.",
)
def verify(anchor: str | None) -> None:
    """Recompute the hash chain and name the first row that was changed."""
    kept = None if anchor is None else ANCHOR.fullmatch(anchor)
    if anchor is not None and not kept:
        raise click.UsageError(f"{anchor!r} is not SEQ:HASH")
    server = api()
    newest = _verify_all(server)
    if kept and int(kept[1]) <= newest["pruned"]:
        raise LoraplexError(
            f"--anchor: entry {kept[1]} has been pruned; give a line that a later verify printed"
        )
    if kept:
        entries = server.get("/admin/v1/audit", after=int(kept[1]) + 1, limit=1)["data"]
        if [(entry["seq"], entry["hash"]) for entry in entries] != [(int(kept[1]), kept[2])]:
            raise LoraplexError(f"entry {kept[1]} of the audit log differs from the anchor")
    told = f"{newest['seq'] - newest['pruned']} entries are unchanged since they were written"
    show_done(newest, f"{told}\n{newest['seq']}:{newest['hash']}")


def _verify_all(server: Api) -> dict[str, Any]:
    """Verifies the whole chain and returns the last page. Raises LoraplexError."""
    after = 0
    with progress("verifying", of_bytes=False) as report:
        while True:
            seen = server.get("/admin/v1/audit/verify", after=after)
            report(seen["seq"], seen["newest"])
            if seen["broken"] is not None:
                raise LoraplexError(f"entry {seen['broken']} of the audit log: {seen['reason']}")
            if seen["seq"] >= seen["newest"] or seen["seq"] == after:
                return seen
            after = seen["seq"]
