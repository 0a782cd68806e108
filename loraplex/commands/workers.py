"""`loraplex workers`: those that run. `loraplex worker` runs one."""

from __future__ import annotations

import time

import click

from loraplex.commands.options import api, json_option, route
from loraplex.errors import Refused
from loraplex.output import show

COLUMNS = (
    *("id", "state", "address", "resident", "num_running", "num_waiting", "tokens_per_s"),
    *("reported_at", "reason"),
)
MODELS = (
    *("name", "tier", "num_bytes", "num_swaps", "num_running", "num_waiting", "pages_total"),
    *("pages_free", "pages_cached", "error"),
)
ADAPTERS = ("digest", "tier", "num_bytes", "leases", "pinned", "error")
MEMORY = ("arena_bytes", "extents")
TENANTS = ("tenant", "kv_bytes", "adapter_bytes")
SETTINGS = ("setting", "value")
LOOK_INTERVAL_S = 0.5


@click.group("workers")
def workers_group() -> None:
    """The workers that run: what they do, and taking them out of service."""


@workers_group.command("list")
@json_option
def list_workers(as_json: bool) -> None:
    """List the workers. One that is lost stays in the list for half a minute."""
    with api() as server:
        show(server.all("/admin/v1/workers", cursor="id"), COLUMNS, as_json)


@workers_group.command("show")
@click.argument("worker", metavar="ID")
@json_option
def show_worker(worker: str, as_json: bool) -> None:
    """Show what a worker says of itself: models, adapters by tier, memory, settings."""
    with api() as server:
        found = server.get(route("workers", worker))
    show([found], COLUMNS, as_json)
    if as_json:
        return
    adapters = [adapter for held in found["adapters"].values() for adapter in held]
    settings = [
        {"setting": name, "value": value} for name, value in sorted(found["settings"].items())
    ]
    for rows, columns in (
        *((found["models"], MODELS), (adapters, ADAPTERS), ([found], MEMORY)),
        *((found["tenants"], TENANTS), (settings, SETTINGS)),
    ):
        click.echo()
        show(rows, columns, as_json)


@workers_group.command("drain")
@click.argument("worker", metavar="ID")
@click.option("--wait", is_flag=True, help="Return when nothing is left there.")
def drain(worker: str, wait: bool) -> None:
    """Have a worker take nothing new, and finish what it has."""
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
                click.echo(f"{worker} has ended")
                return
    click.echo(f"{worker} takes nothing new; {_left(found)}")


@workers_group.command("undrain")
@click.argument("worker", metavar="ID")
def undrain(worker: str) -> None:
    """Have a worker take requests again."""
    with api() as server:
        server.delete(route("workers", worker, "drain"))
    click.echo(f"{worker} takes requests again")


def _left(worker: dict[str, int]) -> str:
    return f"{worker['num_running']} run there and {worker['num_waiting']} wait"
