"""Command group `loraplex workers`, for running workers. The command `loraplex worker` runs a
worker."""

from __future__ import annotations

import time

import click

from loraplex.commands.options import api, json_option, list_options, route
from loraplex.errors import Refused
from loraplex.output import is_json, show_done, show_list, show_one
from loraplex.tables import Column, Kind

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


@click.group("workers")
def workers_group() -> None:
    """Running workers: show their state, and take them out of service."""


@workers_group.command("list")
@list_options
def list_workers() -> None:
    """List the workers. A lost one stays in the list for half a minute."""
    with api() as server:
        show_list(server.all("/admin/v1/workers", cursor="id"), COLUMNS)


@workers_group.command("show")
@click.argument("worker", metavar="ID")
@json_option
def show_worker(worker: str) -> None:
    """Show what a worker reports: models, adapters by tier, memory, settings."""
    with api() as server:
        found = server.get(route("workers", worker))
    if is_json():
        show_one(found)
        return
    show_one({field: found[field] for field in SUMMARY}, KINDS)
    adapters = [adapter for held in found["adapters"].values() for adapter in held]
    settings = [
        {"setting": name, "value": value} for name, value in sorted(found["settings"].items())
    ]
    for rows, columns in (
        *((found["models"], MODELS), (adapters, ADAPTERS)),
        *((found["tenants"], TENANTS), (settings, SETTINGS)),
    ):
        if rows:
            click.echo()
            show_list(rows, columns)


@workers_group.command("drain")
@click.argument("worker", metavar="ID")
@click.option("--wait", is_flag=True, help="Wait until no request is left on the worker.")
@json_option
def drain(worker: str, wait: bool) -> None:
    """Let a worker finish its requests, without accepting new ones."""
    path = route("workers", worker)
    with api() as server:
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
    show_done(found, f"{worker} takes nothing new; {_left(found)}")


@workers_group.command("undrain")
@click.argument("worker", metavar="ID")
@json_option
def undrain(worker: str) -> None:
    """Let a worker accept requests again."""
    with api() as server:
        found = server.delete(route("workers", worker, "drain"))
    show_done(found, f"{worker} takes requests again")


def _left(worker: dict[str, int]) -> str:
    return f"{worker['num_running']} run there and {worker['num_waiting']} wait"
