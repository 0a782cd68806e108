"""Command `loraplex adapter push`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from admin.uploads.version_create import VersionCreate
from loraplex.commands.command import Command
from loraplex.commands.options import api, from_json, pairs, struct_options, tenant_option
from loraplex.errors import ApiFailure, Refused
from loraplex.output import ProgressCallback, is_json, progress, show_done, show_list, tell, waiting

if TYPE_CHECKING:
    from loraplex.api import Api
    from loraplex.pushing import Version

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
PATIENCE_S = 120.0
"""Maximum seconds for which each call waits while the tenant exceeds its rate of changes or the
server restarts."""
NOT_PLAIN = {
    *("upload", "name", "tenant", "sha256", "signature", "approve_template"),
    "upload_signature",
    *("serving", "folder_serving", "folder_tokens"),
}
"""Fields of the upload route for which no option is generated from the struct."""
PLAIN = [name for name in VersionCreate.__struct_fields__ if name not in NOT_PLAIN]
"""Fields of the upload route whose options are generated from the struct and sent unchanged."""
FIELDS = ("name", *PLAIN, "tenant", "serving", "approve_template", "weights_only")
"""Fields that an item of a manifest may have in addition to `folder`."""


class Upload(NamedTuple):
    folder: Path
    fields: dict[str, Any]
    """Fields of the upload route. May also contain `weights_only` and `sign` (a private key), which
    are not sent."""


class Pushed(NamedTuple):
    version: Version
    taken: str
    """Description of what the version took from other files in the folder."""


@click.command("push", cls=Command, example="support-bot/ --tenant acme --alias staging")
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=FOLDER)
@click.option("--name", help="Adapter name (default: name of the folder).")
@click.option(
    "--manifest",
    type=FILE,
    help='JSON file with a list of objects. Each has "folder", relative to the file, and any of'
    f" {', '.join(FIELDS)}. The command's options are their defaults.",
)
@struct_options(VersionCreate, *PLAIN)
@click.option(
    "--serving", type=FILE, help="JSON file with chat_template, stop, defaults and metadata."
)
@click.option(
    "--chat-template",
    type=FILE,
    help="Jinja chat template. It is used once an admin has approved it.",
)
@click.option(
    "--approve-template", is_flag=True, help="Let the chat template run (admin keys only)."
)
@click.option(
    "--weights-only",
    is_flag=True,
    help="Take no chat template, end tokens or defaults from chat_template.jinja, "
    "tokenizer_config.json and generation_config.json of FOLDER.",
)
@click.option(
    "--sign",
    "key_file",
    type=FILE,
    metavar="KEYFILE",
    help="Sign the content with this ed25519 private key (PEM or OpenSSH).",
)
@click.option(
    "--metadata",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value to store with the version, such as run=7; may be repeated.",
)
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until a worker has verified the version (default: wait).",
)
@tenant_option
def push_command(
    folders: tuple[Path, ...],
    name: str | None,
    manifest: Path | None,
    serving: Path | None,
    chat_template: Path | None,
    weights_only: bool,
    key_file: Path | None,
    metadata: tuple[str, ...],
    wait: bool,
    **given: Any,
) -> None:
    """Upload each FOLDER that peft saved as a new version of the adapter with the folder's name.

    If some are refused, the others are pushed and the refusals are listed at the end."""
    given["serving"] = _serving(serving, chat_template, pairs("--metadata", metadata))
    given["weights_only"] = weights_only
    given["sign"] = key_file and _private_key(key_file)
    common = {
        key: value
        for key, value in given.items()
        if value not in (None, "", {}) and value is not False
    }
    if name is not None and (len(folders) != 1 or manifest):
        raise click.UsageError(
            "--name needs exactly one FOLDER; several are named after their folders"
        )
    uploads = [
        Upload(f, common | {"name": f.resolve().name if name is None else name}) for f in folders
    ]
    if manifest:
        uploads += _listed(manifest, common)
    if not uploads:
        raise click.UsageError("give a FOLDER or --manifest")
    is_alone = len(folders) == 1 and not manifest
    server = api()
    server.patience_s = PATIENCE_S
    pushed, failures = _push_all(server, uploads, wait=wait, is_alone=is_alone)
    made = [version for version, _ in pushed]
    if is_alone:
        show_done(made[0], _told(made[0]))
    elif is_json():
        show_list(made, ())
    else:
        for version in made:
            click.echo(_told(version))
    for version, taken in pushed:
        _advise(version, taken, given["tenant"])
    if failures:
        told = "\n".join(failures)
        raise ApiFailure(f"{len(failures)} of {len(uploads)} were not pushed:\n{told}")


def _push_all(
    server: Api, uploads: Sequence[Upload], *, wait: bool, is_alone: bool
) -> tuple[list[Pushed], list[str]]:
    """Pushes all uploads. Returns the created versions, and the failures of the other uploads. If
    there is only one upload (`is_alone`), raises its failure instead."""
    from loraplex.adapter_folder import find_adapter
    from loraplex.folder_serving import describe_taken, read_folder_serving
    from loraplex.folder_tokens import read_folder_tokens
    from loraplex.pushing import num_bytes, push, wait_ready

    made: list[tuple[int, Pushed]] = []
    failures: list[str] = []

    def fail(number: int, error: Refused | ApiFailure) -> None:
        if is_alone:
            raise error
        failures.append(f"number {number}, {uploads[number - 1].folder}: {error}")

    what = uploads[0].fields["name"] if is_alone else f"{len(uploads)} adapters"
    folders = [find_adapter(upload.folder, tell) for upload in uploads]
    sizes = [num_bytes(folder) for folder in folders]
    with progress(f"uploading {what}", "validating") as report:
        for number, (folder, (outer, fields)) in enumerate(zip(folders, uploads, strict=True), 1):
            before = sum(sizes[: number - 1])
            part = _part(report, before, sizes[number - 1], sum(sizes))
            fields = dict(fields)
            try:
                found = {}
                if not fields.pop("weights_only", False):
                    found, tokens = read_folder_serving(folder, tell), read_folder_tokens(folder)
                    if outer != folder:
                        found = found or read_folder_serving(outer, tell)
                        tokens = tokens or read_folder_tokens(outer)
                    fields |= {"folder_tokens": tokens} if tokens else {}
                sent = fields | ({"folder_serving": found} if found else {})
                version = push(server, folder, sent, part)
                taken = describe_taken(version, found, fields.get("serving", {}))
                made.append((number, Pushed(version, taken)))
            except ApiFailure as error:
                fail(number, error)
    if not wait:
        return [pushed for _, pushed in made], failures
    ready: list[Pushed] = []
    with _proving([pushed for _, pushed in made], is_alone=is_alone) as (say, report):
        for done, (number, (version, taken)) in enumerate(made, 1):
            tenant = uploads[number - 1].fields.get("tenant")
            try:
                ready.append(Pushed(wait_ready(server, version, tenant, say), taken))
            except Refused as error:
                fail(number, error)
            report(done, len(made))
    return ready, failures


@contextmanager
def _proving(
    made: Sequence[Pushed], *, is_alone: bool
) -> Iterator[tuple[Callable[[str], None], ProgressCallback]]:
    """Shows the progress of verification: a spinner for one adapter, a bar for several. Yields two
    callbacks. The first one gets a description of what a version waits for, and the second one gets
    the number of verified versions and the number of all versions."""
    if is_alone:
        name = f"{made[0].version['name']}@{made[0].version['version']}"
        with waiting(f"proving {name}") as say:
            yield say, lambda _done, _total: None
        return
    what, said = f"proving {len(made)} adapters", set[str]()

    def say_once(detail: str) -> None:
        if detail not in said:
            said.add(detail)
            tell(f"{what}: {detail}")

    with progress(what, of_bytes=False) as report:
        yield say_once, report


def _part(report: ProgressCallback, before: int, size: int, total: int) -> ProgressCallback:
    """Returns the progress callback of one upload, which reports the progress of all uploads."""
    return lambda done, _: report(before + min(done, size), total)


def _told(version: Version) -> str:
    state = ", ".join(version["aliases"]) if version["state"] == "ready" else version["state"]
    return f"{version['name']}@{version['version']}" + (f" ({state})" if state else "")


def _advise(version: Version, taken: str, tenant: str | None) -> None:
    name = f"{version['name']}@{version['version']}"
    if taken:
        tell(
            f"{name}: taken from other files of the folder, because {version['model']} has others:"
            f" {taken} (--weights-only leaves them)"
        )
    for warning in version["warnings"]:
        tell(f"{name}: {warning}")
    if version["state"] == "awaiting_approval":
        tell(
            f"{name} is proved, and no alias points to it until an admin approves its chat"
            f" template: loraplex adapter approve {name} --tenant {tenant or 'TENANT'};"
            " or push it without the template (--weights-only, if it is the folder's)"
        )
    if version["state"] == "ready" and version["wanted_alias"]:
        tell(
            f"{version['wanted_alias']} was not moved to {name}: it was moved since, or its pins"
            " would not fit"
        )


def _private_key(file: Path) -> Any:
    """Reads the private key for signatures. Raises UsageError."""
    from adapters.format.signature import MAX_KEY_BYTES, KeyRefused, read_private_key

    try:
        with file.open("rb") as opened:
            return read_private_key(opened.read(MAX_KEY_BYTES))
    except KeyRefused as error:
        raise click.UsageError(f"--sign {file}: {error}") from None


def _listed(manifest: Path, common: dict[str, Any]) -> list[Upload]:
    """Returns the uploads that a manifest lists. Raises UsageError, which names the wrong item."""
    try:
        items = from_json(manifest.read_text())
    except ValueError as error:
        raise click.UsageError(f"{manifest} is not JSON: {error}") from error
    if not isinstance(items, list):
        raise click.UsageError(f"{manifest} is not a JSON list")
    uploads: list[Upload] = []
    for number, item in enumerate(items, 1):
        where = f"{manifest}, item {number}"
        if not isinstance(item, dict) or not isinstance(item.get("folder"), str):
            raise click.UsageError(f'{where}: not an object with "folder"')
        folder = manifest.parent / item.pop("folder")
        if not folder.is_dir():
            raise click.UsageError(f"{where}: there is no folder {folder}")
        for key in item:
            if key not in FIELDS:
                raise click.UsageError(f"{where}: {key!r} is not one of {', '.join(FIELDS)}")
        uploads.append(Upload(folder, common | {"name": folder.resolve().name} | item))
    return uploads


def _serving(
    file: Path | None, chat_template: Path | None, metadata: dict[str, str]
) -> dict[str, Any]:
    """Returns the serving data in the file, updated with the options."""
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
