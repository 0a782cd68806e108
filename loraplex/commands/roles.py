"""Commands that run everything on one machine, or one role."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click

from adapters.store.folder import DIGEST
from loraplex.commands.command import Command
from loraplex.commands.options import (
    SERVING,
    TRANSPORT,
    UPLOADS,
    WORKING,
    pairs,
    settings_of,
    settings_options,
)
from loraplex.output import is_json, tell
from loraplex.private import path_digest, write_private
from loraplex.settings import SECRETS, Settings, check_address

model_option = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Base model; without NAME it is named after its folder or file. May be repeated.",
)


@click.command(
    "serve", cls=Command, example="--model ~/models/Qwen3-8B --host 0.0.0.0", output="text"
)
@click.option(
    "--demo", is_flag=True, help="Serve a small model with two tenants and their adapters."
)
@model_option
@settings_options(SERVING, WORKING, UPLOADS)
def serve_command(demo: bool, **flags: Any) -> None:
    """Serve everything from this machine: database, worker and gateway."""
    from loraplex.box.serve import serve
    from loraplex.box.worker_process import check_torch

    check_torch()
    serve(settings_of(flags), with_demo=demo)


@click.command("gateway", cls=Command, example="--host 0.0.0.0 --port 8000", output="text")
@click.option("--admin", is_flag=True, help="Serve the admin plane on the same port.")
@click.option("--fd", type=int, hidden=True, help="Inherited listening socket.")
@click.option("--management-fd", type=int, hidden=True, help="Inherited management socket.")
@click.option(
    "--worker-health", hidden=True, help="Health address of a worker that /metrics includes."
)
@settings_options(SERVING, TRANSPORT, UPLOADS)
def gateway_command(
    admin: bool,
    fd: int | None,
    management_fd: int | None,
    worker_health: str | None,
    **flags: Any,
) -> None:
    """Run the gateway alone.

    Requires LORAPLEX_DATABASE_URL. Workers register there, or are listed in LORAPLEX_WORKERS."""
    from loraplex.roles.planes import run_gateway

    settings = settings_of(flags)
    sockets = _sockets(settings, fd, management_fd)
    # A supervisor that passes its sockets to this process has already logged the warnings.
    run_gateway(
        settings,
        with_admin=admin,
        sockets=sockets,
        warns=fd is None,
        worker_health=worker_health,
    )


def _sockets(
    settings: Settings, fd: int | None = None, management_fd: int | None = None
) -> tuple[socket.socket, socket.socket]:
    """Returns the public and the management socket. A socket whose descriptor is given is
    inherited. Otherwise it is opened at the address in the settings."""
    from loraplex.roles.listener import inherited, listen, listen_for_management

    return (
        listen(settings) if fd is None else inherited(fd),
        listen_for_management(settings) if management_fd is None else inherited(management_fd),
    )


@click.command("admin", cls=Command, example="--host 0.0.0.0 --port 8003", output="text")
@settings_options(SERVING, UPLOADS)
def admin_command(**flags: Any) -> None:
    """Run the admin plane alone. Requires LORAPLEX_DATABASE_URL."""
    from loraplex.roles.planes import run_admin

    settings = settings_of(flags)
    run_admin(settings, _sockets(settings))


@click.command(
    "worker",
    cls=Command,
    example="--listen unix:/run/loraplex/worker.sock --device cuda",
    output="text",
)
@click.option(
    "--model",
    "digests",
    multiple=True,
    metavar="NAME=DIGEST",
    help="Base model to load before a gateway connects; may be repeated.",
)
@click.option(
    "--listen", required=True, help="Address to listen on: unix:/PATH or tcp://HOST:PORT."
)
@click.option(
    "--health",
    default="127.0.0.1:8001",
    show_default=True,
    help="Address of probes and metrics: HOST:PORT or unix:/PATH.",
)
@click.option(
    "--advertise",
    metavar="ADDRESS",
    help="Register the worker under this address, at which gateways reach it.",
)
@settings_options(TRANSPORT, WORKING)
def worker_command(
    digests: tuple[str, ...], listen: str, health: str, advertise: str | None, **flags: Any
) -> None:
    """Run one worker alone on models of the store. Gateways tell it which others to load.

    --advertise requires LORAPLEX_DATABASE_URL."""
    import asyncio

    from loraplex.box.children import python
    from loraplex.box.worker_process import check_torch, run_worker
    from loraplex.otlp_metrics import check_metric_sending
    from loraplex.roles.worker import worker_config
    from telemetry.logs import set_up_logging

    check_torch()
    check_metric_sending(os.environ)
    settings = settings_of(flags)
    models = pairs("--model", digests, "NAME=DIGEST")
    for name, digest in models.items():
        if not DIGEST.fullmatch(digest):
            raise click.UsageError(f"--model {name}={digest}: this is not NAME=DIGEST")
    _check_addresses(settings, listen, health, advertise)
    config = worker_config(settings, models, listen, health)
    settings.make_home()
    path = settings.home / f"worker-{path_digest(Path(listen))}.json"
    write_private(path, config.to_json())
    set_up_logging(settings.log_format or "text", settings.log_level)
    command = python("-m", "loraplex.roles.worker_process", str(path))
    if advertise is None:
        running = run_worker(command)
    else:
        running = _run_advertised(command, settings, advertise, health)
    sys.exit(asyncio.run(running))


def _check_addresses(settings: Settings, listen: str, health: str, advertise: str | None) -> None:
    """Checks the addresses before anything is loaded. Raises UsageError."""
    try:
        check_address(listen, lowest_port=0)
        if advertise is not None:
            check_address(advertise)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        check_address(health if health.startswith("unix:") else f"tcp://{health}", lowest_port=0)
    except ValueError as error:
        raise click.UsageError(f"{health!r} is not HOST:PORT or unix:/PATH") from error
    security = settings.security
    if listen.startswith("tcp://") and security.tls and not security.gateways:
        tell("warning: transport_gateways is not set, so that no gateway may connect")
    if listen.startswith("tcp://") and not (security.tls or security.insecure):
        raise click.UsageError(
            "--listen tcp:// needs the settings transport_certificate, transport_key and"
            " transport_authority, or --insecure-transport"
        )


def _run_advertised(
    command: list[str], settings: Settings, address: str, health: str
) -> Coroutine[Any, Any, int]:
    from loraplex.box.worker_process import run_worker
    from loraplex.probe import answers_ok
    from loraplex.roles.registration import registered

    if not settings.database_url:
        raise click.UsageError("--advertise needs LORAPLEX_DATABASE_URL")
    worker_id = f"worker-{socket.gethostname()}-{secrets.token_hex(6)}"
    if health.endswith(":0"):
        raise click.UsageError("--advertise needs --health with a port other than 0")
    registering = registered(
        *(settings.database_url, worker_id, address),
        is_listening=lambda: answers_ok(health, "/readyz"),
    )
    return run_worker([*command, worker_id], registering)


@click.command("migrate", cls=Command, example="", output="text")
@click.option(
    "--post",
    is_flag=True,
    help="Also run steps that must wait until no process of the previous version runs.",
)
@settings_options()
def migrate_command(post: bool, **flags: Any) -> None:
    """Migrate the database of LORAPLEX_DATABASE_URL to this version's schema.

    Safe while the previous version runs. Use --post once it no longer runs."""
    import asyncio

    from loraplex.roles.bootstrap import migrate_database

    settings = settings_of(flags)
    if not settings.database_url:
        raise click.UsageError(
            "set LORAPLEX_DATABASE_URL; `loraplex serve` migrates its own database"
        )
    applied = asyncio.run(migrate_database(settings.database_url, with_post=post))
    click.echo("\n".join(applied) or "nothing to do")


@click.command("bootstrap", cls=Command, example="", output="text")
@settings_options()
def bootstrap_command(**flags: Any) -> None:
    """Create the first admin key of LORAPLEX_DATABASE_URL, and print it.

    Requires the LORAPLEX_KEY_PEPPER of the gateways and admin planes. Refused if there is a valid
    admin key already."""
    import asyncio

    from loraplex.roles.bootstrap import make_first_admin_key

    settings = settings_of(flags)
    if not settings.database_url:
        raise click.UsageError("set LORAPLEX_DATABASE_URL; `loraplex serve` creates its own keys")
    if not settings.key_pepper:
        raise click.UsageError("set LORAPLEX_KEY_PEPPER to that of the gateways and admin planes")
    pepper = settings.key_pepper.encode()
    click.echo(asyncio.run(make_first_admin_key(settings.database_url, pepper)))


@click.command("config", cls=Command, example="--config loraplex.toml")
@model_option
@settings_options(SERVING, TRANSPORT, WORKING, UPLOADS)
def config_command(**flags: Any) -> None:
    """Print the effective settings as a settings file, with secrets hidden."""
    from loraplex.output import show_one

    shown = settings_of(flags).shown()
    if is_json():
        show_one(shown)
    else:
        click.echo("\n".join(_in_toml(name, value) for name, value in shown.items()))


def _in_toml(name: str, value: Any) -> str:
    """Returns a line of the settings file. Settings that are unset or secret become comments."""
    match value:
        case None:
            return f"# {name} ="
        case str() if name in SECRETS:
            return f"# {name} = {value}"
        case dict():
            pairs = (f"{_literal(key)} = {_literal(item)}" for key, item in value.items())
            return f"{name} = {{{', '.join(pairs)}}}"
        case _:
            return f"{name} = {_literal(value)}"


def _literal(value: Any) -> str:
    """Returns a TOML literal, which for texts, numbers and lists is the same as JSON."""
    return json.dumps(value, ensure_ascii=False)
