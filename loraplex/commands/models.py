"""Command group `loraplex model`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from loraplex.box.importing import FORMATS, Formats, import_model
from loraplex.commands.command import Group
from loraplex.commands.options import (
    api,
    confirm,
    route,
    settings_of,
    settings_options,
    yes_option,
)
from loraplex.errors import ApiFailure
from loraplex.output import is_json, progress, show_done, show_list, show_one, tell
from loraplex.tables import Column, Kind

MODELS = (
    Column("name", "name", Kind.NAME),
    Column("state", "state", Kind.WORD),
    Column("residency", "kept", Kind.WORD),
    Column("max_model_len", "max tokens", Kind.NUMBER),
    Column("model_type", "type"),
    Column("created_at", "created", Kind.AGE),
    Column("source", "source", Kind.NAME),
    Column("digest", "digest", Kind.ID),
)
STATES = (
    Column("worker", "worker", Kind.NAME),
    Column("tier", "tier"),
    Column("num_bytes", "size", Kind.SIZE),
    Column("num_running", "running", Kind.NUMBER),
    Column("num_waiting", "waiting", Kind.NUMBER),
    Column("error", "error"),
    Column("idle_since", "idle", Kind.AGE),
    Column("num_swaps", "swaps", Kind.NUMBER),
    Column("load_s", "seconds", Kind.NUMBER),
)
MEANINGS = {
    "auto": "loaded when a request needs it",
    "pinned": "kept on the device of every worker",
    "unloaded": "kept off every device",
}


@click.group("model", cls=Group)
def model_group() -> None:
    """Base models: import, load, pin and delete them."""


@model_group.command("add", example="qwen3-8b=~/models/Qwen3-8B")
@click.argument("model", metavar="NAME=PATH")
@click.option(
    "--weight-format",
    type=click.Choice(FORMATS),
    default="bfloat16",
    show_default=True,
    help="Storage format of matrices: `keep` serves a .gguf file in its own format, `int8` and "
    "`int4` quantise.",
)
@click.option(
    "--table-format",
    type=click.Choice(FORMATS),
    help="Storage format of embedding and output matrix (default: that of --weight-format; `int8` "
    "for `int4`).",
)
@click.option("--replace", is_flag=True, help="Replace the weights of a NAME that is in use.")
@settings_options()
def add(
    model: str, weight_format: str, table_format: str | None, replace: bool, **flags: Any
) -> None:
    """Import a Hugging Face directory or a .gguf file here and register it under NAME."""
    from admin.models.base_choice import source_of
    from loraplex.api import connect, with_store_of_server

    name, equals, path = model.partition("=")
    if not (name and equals and path):
        raise click.UsageError(f"{model!r} is not NAME=PATH")
    settings = with_store_of_server(settings_of(flags))
    with connect(settings) as server:
        known = {each["name"]: each["digest"] for each in server.all("/admin/v1/models")}
    notes: list[str] = []
    with progress(f"importing {name}") as report:
        formats = Formats(weight_format, table_format)
        digest = import_model(Path(path), settings, report, formats, notes.append)
    for sentence in notes:
        tell(f"{name}: {sentence}")
    if not replace and known.get(name, digest) != digest:
        raise ApiFailure(
            f"{name} is served with other weights ({known[name][:12]}); give another name, or "
            f"--replace to serve {digest[:12]} under this one"
        )
    with connect(settings) as server:
        fields = {"name": name, "digest": digest, "source": source_of(Path(path).absolute())}
        made = server.post("/admin/v1/models", fields)
    if made["served_by"] == "transformers":
        tell(f"{name} is served by transformers: there is no native code for {made['model_type']}")
    show_done(made, f"{name} {digest}")


@model_group.command("list", example="", output="table")
def list_models() -> None:
    """List the registered base models with their states on the workers."""
    models = api().all("/admin/v1/models")
    if not is_json():
        models = [model | {"state": _state(model["workers"])} for model in models]
    show_list(models, MODELS)


@model_group.command("show", example="qwen3-8b")
@click.argument("name")
def show_model(name: str) -> None:
    """Show one base model and its tier on each worker."""
    model = api().get(route("models", name))
    if is_json():
        show_one(model)
        return
    workers = model.pop("workers")
    show_one(model, {"created_at": Kind.AGE})
    click.echo()
    show_list(workers, STATES)


@model_group.command("load", example="qwen3-8b")
@click.argument("name")
def load(name: str) -> None:
    """Let workers load a base model again on request; `pin` loads it at once."""
    _move(name, to="auto", unless="pinned")


@model_group.command("unload", example="qwen3-8b")
@click.argument("name")
def unload(name: str) -> None:
    """Unload a base model from every device after its requests have ended, and keep it unloaded."""
    _move(name, to="unloaded")


@model_group.command("pin", example="qwen3-8b")
@click.argument("name")
def pin(name: str) -> None:
    """Load a base model on every worker now, and keep it on the device."""
    _move(name, to="pinned")


@model_group.command("unpin", example="qwen3-8b")
@click.argument("name")
def unpin(name: str) -> None:
    """Unpin a base model: workers may unload it when it is idle."""
    _move(name, to="auto", unless="unloaded")


def _state(workers: list[dict[str, Any]]) -> str:
    """Returns each tier with its number of workers, and an error of a worker if there is one."""
    counts = Counter(
        worker["tier"] + (f": {worker['error']}" if worker["error"] else "") for worker in workers
    )
    return "; ".join(f"{state} ({number})" for state, number in sorted(counts.items()))


def _move(name: str, *, to: str, unless: str = "") -> None:
    """Sets a model's residency to `to`. Does nothing if the present residency is `unless`."""
    path, server = route("models", name), api()
    model, etag = server.get_tagged(path)
    if model["residency"] != unless:
        model = server.patch(path, {"residency": to}, if_match=etag)
    show_done(model, f"{name} is {MEANINGS[model['residency']]}")


@model_group.command("delete", example="qwen3-8b --yes")
@click.argument("name")
@yes_option
def delete_model(name: str, yes: bool) -> None:
    """Delete a base model that no adapter uses. Its files stay in the store."""
    confirm(f"Delete base model {name} and its price?", yes)
    show_done(api().delete(route("models", name)), f"deleted {name}")
