"""Commands that run something: all on one box, or one role."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

import click

from loraplex.commands.options import SERVING, TRANSPORT, WORKING, settings_of, settings_options
from loraplex.private import path_digest
from loraplex.settings import Settings


@click.command("serve")
@click.option("--demo", is_flag=True, help="With a small model, two tenants and their adapters.")
@click.option("--model", "models", multiple=True, metavar="NAME=PATH", help="A base model.")
@settings_options(SERVING, WORKING)
def serve_command(demo: bool, **flags: Any) -> None:
    """Serve everything from this machine: database, worker, gateway."""
    from loraplex.serve import serve

    serve(settings_of(flags), with_demo=demo)


@click.command("gateway")
@click.option("--admin", is_flag=True, help="With the admin plane on the same port.")
@click.option("--fd", type=int, hidden=True, help="An inherited listening socket.")
@settings_options(SERVING, TRANSPORT)
def gateway_command(admin: bool, fd: int | None, **flags: Any) -> None:
    """Run the gateway alone (LORAPLEX_DATABASE_URL; workers register, or LORAPLEX_WORKERS)."""
    from gateway.server import bind
    from loraplex.app import run_gateway

    settings = settings_of(flags)
    inherited = None if fd is None else socket.socket(fileno=fd)
    listener = inherited or bind(settings.host, settings.port)
    run_gateway(settings, with_admin=admin, listener=listener)


@click.command("admin")
@settings_options(SERVING)
def admin_command(**flags: Any) -> None:
    """Run the admin plane alone (LORAPLEX_DATABASE_URL)."""
    from gateway.server import bind
    from loraplex.app import run_admin

    settings = settings_of(flags)
    run_admin(settings, bind(settings.host, settings.port))


@click.command("worker")
@click.option("--model", "digests", multiple=True, metavar="NAME=DIGEST", help="To begin with.")
@click.option("--listen", required=True, help="unix:PATH or tcp://HOST:PORT")
@click.option("--health", default="127.0.0.1:8001", show_default=True)
@click.option("--advertise", metavar="ADDRESS", help="Register it: gateways find it there.")
@settings_options(TRANSPORT, WORKING)
def worker_command(
    digests: tuple[str, ...], listen: str, health: str, advertise: str | None, **flags: Any
) -> None:
    """Run one worker alone, on models of the store; it hears of all others from the gateways.

    To advertise it takes LORAPLEX_DATABASE_URL."""
    from loraplex.worker import worker_config

    settings = settings_of(flags)
    models = dict(_split(pair) for pair in digests)
    config = worker_config(settings, models, listen, health)
    path = settings.home / f"worker-{path_digest(Path(listen))}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.write(path)
    command = [sys.executable, "-m", "workers", str(path)]
    if advertise is None:
        os.execv(sys.executable, command)
    else:
        sys.exit(_run_advertised(command, settings, advertise))


def _run_advertised(command: list[str], settings: Settings, address: str) -> int:
    import asyncio

    from loraplex.registration import check_address, run_registered
    from workers.logs import set_up_logging

    set_up_logging(settings.log_format)
    if not settings.database_url:
        raise click.UsageError("to advertise a worker, set LORAPLEX_DATABASE_URL")
    worker_id = f"worker-{socket.gethostname()}-{secrets.token_hex(6)}"
    command = [*command, worker_id]
    return asyncio.run(
        run_registered(command, settings.database_url, worker_id, check_address(address))
    )


@click.command("migrate")
@settings_options()
def migrate_command(**flags: Any) -> None:
    """Bring the database of LORAPLEX_DATABASE_URL to this version's schema."""
    import asyncio

    from loraplex.bootstrap import migrate_database

    settings = settings_of(flags)
    if not settings.database_url:
        raise click.UsageError("set LORAPLEX_DATABASE_URL; `serve` migrates its own database")
    applied = asyncio.run(migrate_database(settings.database_url))
    click.echo("\n".join(applied) or "nothing to do")


@click.command("config")
@click.option("--model", "models", multiple=True, metavar="NAME=PATH")
@click.option("--json", "as_json", is_flag=True)
@settings_options(SERVING, TRANSPORT, WORKING)
def config_command(as_json: bool, **flags: Any) -> None:
    """Print the effective settings, secrets hidden."""
    from loraplex.output import show

    shown = settings_of(flags).shown()
    rows = [{"setting": name, "value": value} for name, value in shown.items()]
    show([shown] if as_json else rows, ("setting", "value"), as_json)


def _split(pair: str) -> tuple[str, str]:
    name, equals, digest = pair.partition("=")
    if not (name and equals and digest):
        raise click.UsageError(f"{pair!r} is not NAME=DIGEST")
    return name, digest
