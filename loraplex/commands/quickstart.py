"""`loraplex quickstart`: creates everything that a new tenant needs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from loraplex.commands.command import Command
from loraplex.commands.options import api, route
from loraplex.errors import Refused
from loraplex.output import is_json, progress, tell, waiting


@click.command("quickstart", cls=Command, example="acme --adapter ./support-bot")
@click.argument("tenant")
@click.option(
    "--adapter",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder that peft saved: the tenant's first adapter.",
)
@click.option("--name", help="Adapter name (default: name of its folder).")
@click.option(
    "--model", help="Base model (default: found by the adapter's configuration or tensors)."
)
def quickstart_command(
    tenant: str, folder: Path | None, name: str | None, model: str | None
) -> None:
    """Create TENANT with a key and its first adapter, and print the key and a first command.

    An existing tenant gets another key."""
    from loraplex.folder_serving import read_folder_serving
    from loraplex.pushing import push, wait_ready

    if folder is None and (name or model):
        raise click.UsageError("--name and --model need --adapter")
    called = name or (folder.absolute().name if folder else "")
    server = api()
    try:
        server.post("/admin/v1/tenants", {"name": tenant})
    except Refused as error:
        if error.status != 409:
            raise
        tell(f"tenant {tenant} exists already and gets another key")
    if folder is not None:
        if read_folder_serving(folder):
            tell(
                f"only the weights in {folder} are used; `loraplex adapter push` also uses its chat"
                " template and defaults"
            )
        fields = {"name": called, "tenant": tenant} | ({"model": model} if model else {})
        with progress(f"uploading {called}", "validating") as report:
            version = push(server, folder, fields, report)
        with waiting(f"proving {called}@{version['version']}") as say:
            wait_ready(server, version, tenant, say)
    else:
        called = next((each["name"] for each in server.all("/admin/v1/models")), "MODEL")
    key = server.post(route("tenants", tenant, "keys"), {"name": "quickstart"})["key"]
    if is_json():
        print(json.dumps({"tenant": tenant, "key": key, "model": called}, indent=2))
        return
    click.echo(
        f"tenant  {tenant}\nkey     {key}\nmodel   {called}\n\nthe key is shown once; try it:"
    )
    click.echo(f"  LORAPLEX_KEY={key} loraplex chat {shlex.quote(called)}")
