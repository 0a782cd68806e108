"""`loraplex adapter push`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loraplex.commands.options import api, from_json, json_option, pairs, tenant_option
from loraplex.output import progress, show_one, tell, waiting

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("push")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", required=True)
@click.option("--model", help="The base model; without it the tensors decide.")
@click.option("--alias", help="Point this alias to the version once it is ready.")
@click.option("--serving", type=FILE, help="JSON: chat_template, stop, defaults, metadata.")
@click.option("--chat-template", type=FILE, help="Jinja; runs when an admin has approved it.")
@click.option(
    "--approve-template", is_flag=True, help="Let the chat template run (admin keys only)."
)
@click.option("--metadata", multiple=True, metavar="KEY=VALUE")
@click.option("--wait/--no-wait", default=True, help="Until it is proved; the default.")
@tenant_option
@json_option
def push_command(
    folder: Path,
    name: str,
    model: str | None,
    alias: str | None,
    serving: Path | None,
    chat_template: Path | None,
    approve_template: bool,
    metadata: tuple[str, ...],
    wait: bool,
    tenant: str | None,
    as_json: bool,
) -> None:
    """Upload what peft saved in FOLDER as a new version."""
    from loraplex.pushing import push, wait_ready

    given = {"name": name, "model": model, "alias": alias, "tenant": tenant}
    given["serving"] = _serving(serving, chat_template, pairs("--metadata", metadata))
    given["approve_template"] = approve_template
    fields = {key: value for key, value in given.items() if value}
    with api() as server:
        with progress(f"uploading {name}", "validating") as report:
            made = push(server, folder, fields, report)
        if wait:
            with waiting(f"proving {name}@{made['version']}") as say:
                made = wait_ready(server, made, tenant, say)
    if as_json:
        show_one(made, as_json)
        return
    state = ", ".join(made["aliases"]) if made["state"] == "ready" else made["state"]
    click.echo(f"{name}@{made['version']}" + (f" ({state})" if state else ""))
    if made["state"] == "awaiting_approval":
        tell(
            "it is proved, and no alias points to it until an admin approves its chat template:"
            f" loraplex adapter approve {name}@{made['version']} --tenant"
            f" {tenant or 'TENANT'}; or push it without the template"
        )
    if made["state"] == "ready" and made["wanted_alias"]:
        tell(f"{made['wanted_alias']} was not moved: it was moved since, or its pins would not fit")


def _serving(
    file: Path | None, chat_template: Path | None, metadata: dict[str, str]
) -> dict[str, Any]:
    """The file's object with what the flags say."""
    try:
        serving = from_json(file.read_text()) if file else {}
    except ValueError as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(serving, dict):
        raise click.UsageError(f"{file} is not a JSON object")
    if chat_template:
        serving["chat_template"] = chat_template.read_text()
    if metadata:
        serving["metadata"] = serving.get("metadata", {}) | metadata
    return serving
