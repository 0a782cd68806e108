"""Command group `loraplex workers`. The command `loraplex worker` instead runs a worker."""

from __future__ import annotations

import time

import click

from loraplex.commands.command import Group
from loraplex.commands.options import api, route
from loraplex.errors import Refused
from loraplex.output import is_json, show_done, show_list, show_one
from loraplex.settings import SIZES
from loraplex.tables import Column, Kind, Row, Size

COLUMNS = (
    Column("id", "id", Kind.NAME),
    Column("state", "state", Kind.WORD),
    Column("num_running", "running", Kind.NUMBER),
    Column("num_waiting", "waiting", Kind.NUMBER),
    Column("reason", "reason", Kind.PROSE),
    Column("tokens_per_s", "tokens/s", Kind.NUMBER),
    Column("resident", "models"),
    Column("reported_at", "reported", Kind.AGE),
    Column("address", "address"),
)
MODELS = (
    Column("name", "model", Kind.NAME),
    Column("tier", "tier"),
    Column("num_bytes", "size", Kind.SIZE),
    Column("num_running", "running", Kind.NUMBER),
    Column("num_waiting", "waiting", Kind.NUMBER),
    Column("pages_free", "free", Kind.NUMBER),
    Column("pages_cached", "cached", Kind.NUMBER),
    Column("pages_total", "pages", Kind.NUMBER),
    Column("num_swaps", "swaps", Kind.NUMBER),
    Column("error", "error"),
)
ADAPTERS = (
    Column("names", "adapter", Kind.NAME),
    Column("tier", "tier"),
    Column("num_bytes", "size", Kind.SIZE),
    Column("leases", "running", Kind.NUMBER),
    Column("pinned", "pinned"),
    Column("error", "error"),
    Column("digest", "digest", Kind.ID),
)
TENANTS = (
    Column("tenant", "tenant", Kind.NAME),
    Column("kv_bytes", "pages", Kind.SIZE),
    Column("adapter_bytes", "adapters", Kind.SIZE),
)
SETTINGS = (Column("setting", "setting", Kind.NAME), Column("value", "value", Kind.PROSE))
SUMMARY = (
    *("id", "state", "reason", "address", "num_running", "num_waiting", "tokens_per_s"),
    *("reported_at", "arena_bytes", "extents"),
)
KINDS = {"reported_at": Kind.AGE, "arena_bytes": Kind.SIZE}
LOOK_INTERVAL_S = 0.5


@click.group("workers", cls=Group)
def workers_group() -> None:
    """Running workers: show their state, and take them out of service."""


@workers_group.command("list", example="", output="table")
def list_workers() -> None:
    """List the workers. A lost one stays in the list for half a minute."""
    show_list(api().all("/admin/v1/workers", cursor="id"), COLUMNS)


@workers_group.command("show", example="worker-0")
@click.argument("worker", metavar="ID")
def show_worker(worker: str) -> None:
    """Show what a worker reports: models, adapters by tier, memory, settings."""
    found = api().get(route("workers", worker))
    if is_json():
        show_one(found)
        return
    summary = {field: found[field] for field in SUMMARY}
    summary["extents"] += "\n(w weights, k KV pages, a adapters, . free)"
    if found.get("num_unlisted_adapters"):
        summary["unlisted adapters"] = found["num_unlisted_adapters"]
    show_one(summary, KINDS)
    adapters = [adapter for held in found["adapters"].values() for adapter in held]
    tenants = [row | {"tenant": row["tenant"] or "(none)"} for row in found["tenants"]]
    settings = [_setting(*item) for item in sorted(found["settings"].items())]
    for rows, columns in (
        *((found["models"], MODELS), (adapters, ADAPTERS)),
        *((tenants, TENANTS), (settings, SETTINGS)),
    ):
        if rows:
            click.echo()
            show_list(rows, columns)


def _setting(name: str, value: str) -> Row:
    """Returns the row of a setting, which a worker reports as text."""
    is_size = name in SIZES or name.startswith("adapter_memory_")
    shown = Size(value) if is_size and value.isdecimal() else value
    return {"setting": name, "value": shown if value else "not set"}


@workers_group.command("drain", example="worker-0 --wait")
@click.argument("worker", metavar="ID")
@click.option("--wait", is_flag=True, help="Wait until no request is left on the worker.")
def drain(worker: str, wait: bool) -> None:
    """Let a worker finish its requests, without accepting new ones."""
    path, server = route("workers", worker), api()
    found = server.post(f"{path}/drain")
    while wait and (found["state"] == "ready" or found["num_running"] + found["num_waiting"]):
        time.sleep(LOOK_INTERVAL_S)
        try:
            found = server.get(path)
        except Refused as refused:
            if refused.code != "worker_not_found":
                raise
            show_done(found, f"{worker} has ended")
            return
    left = f"{found['num_running']} requests run there and {found['num_waiting']} wait"
    show_done(found, f"{worker} accepts no new requests; {left}")


@workers_group.command("undrain", example="worker-0")
@click.argument("worker", metavar="ID")
def undrain(worker: str) -> None:
    """Let a worker accept requests again."""
    show_done(api().delete(route("workers", worker, "drain")), f"{worker} accepts requests again")
