"""`loraplex model`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from loraplex.commands.options import api, json_option, route, settings_of, settings_options
from loraplex.output import progress, show

COLUMNS = ("name", "model_type", "max_model_len", "residency", "digest", "created_at")
LIST = (*COLUMNS, "state")
STATES = (
    *("worker", "tier", "num_bytes", "num_swaps", "num_running", "num_waiting", "idle_since"),
    *("load_s", "error"),
)
MEANINGS = {
    "auto": "loaded when it is asked for",
    "pinned": "kept on the device of every worker",
    "unloaded": "kept off every device",
}


@click.group("model")
def model_group() -> None:
    """Base models."""


@model_group.command("add")
@click.argument("model", metavar="NAME=PATH")
@settings_options()
def add(model: str, **flags: Any) -> None:
    """Import a Hugging Face directory or a .gguf file here and register it under NAME."""
    from loraplex.api import connect, with_store_of_server
    from loraplex.box.importing import import_model

    name, equals, path = model.partition("=")
    if not (name and equals and path):
        raise click.UsageError(f"{model!r} is not NAME=PATH")
    settings = with_store_of_server(settings_of(flags))
    with progress(f"importing {name}") as report:
        digest = import_model(Path(path), settings, report)
    with connect(settings) as server:
        server.post("/admin/v1/models", {"name": name, "digest": digest})
    click.echo(f"{name} {digest}")


@model_group.command("list")
@json_option
def list_models(as_json: bool) -> None:
    """List the registered base models, each with its state on the workers."""
    with api() as server:
        models = server.all("/admin/v1/models")
    if not as_json:
        models = [model | {"state": _state(model["workers"])} for model in models]
    show(models, LIST, as_json)


@model_group.command("show")
@click.argument("name")
@json_option
def show_model(name: str, as_json: bool) -> None:
    """Show one base model, and in which tier each worker has it."""
    with api() as server:
        model = server.get(route("models", name))
    show([model], COLUMNS, as_json)
    if not as_json:
        click.echo()
        show(model["workers"], STATES, as_json)


@model_group.command("load")
@click.argument("name")
def load(name: str) -> None:
    """Let workers load it again when it is requested; `pin` loads it at once."""
    _move(name, to="auto", unless="pinned")


@model_group.command("unload")
@click.argument("name")
def unload(name: str) -> None:
    """Take it off every device, when what runs there has ended, and keep it off."""
    _move(name, to="unloaded")


@model_group.command("pin")
@click.argument("name")
def pin(name: str) -> None:
    """Load it on every worker now, and keep it on the device."""
    _move(name, to="pinned")


@model_group.command("unpin")
@click.argument("name")
def unpin(name: str) -> None:
    """Leave it to its use whether it stays on a device."""
    _move(name, to="auto", unless="unloaded")


def _state(workers: list[dict[str, Any]]) -> str:
    """Each tier with its number of workers, and the reason where there is one."""
    counts = Counter(
        worker["tier"] + (f": {worker['error']}" if worker["error"] else "") for worker in workers
    )
    return "; ".join(f"{state} ({number})" for state, number in sorted(counts.items()))


def _move(name: str, *, to: str, unless: str = "") -> None:
    """Sets its residency, unless it has the one named."""
    path = route("models", name)
    with api() as server:
        model, etag = server.get_tagged(path)
        if model["residency"] != unless:
            model = server.patch(path, {"residency": to}, if_match=etag)
    click.echo(f"{name} is {MEANINGS[model['residency']]}")


@model_group.command("delete")
@click.argument("name")
@click.confirmation_option(prompt="Delete the model's name and price?")
def delete_model(name: str) -> None:
    """Delete a base model that no adapter is bound to. The store keeps its files."""
    with api() as server:
        server.delete(route("models", name))
    click.echo(f"deleted {name}")
