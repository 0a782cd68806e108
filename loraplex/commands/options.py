"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click

from loraplex.settings import Settings, load_settings

if TYPE_CHECKING:
    from loraplex.api import Api

SPAN = re.compile(r"(\d{1,5})([hd])", re.ASCII)
F = TypeVar("F", bound=Callable[..., Any])

PLACE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--data-dir", {"type": click.Path(path_type=Path), "help": "Everything kept; ~/.loraplex"}),
)
SERVING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--host", {}),
    ("--port", {"type": int}),
    ("--management-host", {"help": "of metrics, and of the admin plane where --host is public"}),
    ("--management-port", {"type": int}),
    ("--tls-certificate", {"type": click.Path(path_type=Path), "help": "of --port; PEM"}),
    ("--tls-key", {"type": click.Path(path_type=Path)}),
)
TRANSPORT: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--insecure-transport",
        {"is_flag": True, "default": None, "help": "Connect to workers over tcp:// without TLS."},
    ),
)
WORKING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--device", {"help": "Device of the worker: auto, cpu or cuda."}),
    ("--dtype", {"help": "Precision of weights and KV pages: bfloat16 or float32."}),
    ("--ops", {"help": "Kernels: cpu, reference or cuda (default: those of --device)."}),
    ("--threads", {"type": int}),
    ("--memory", {"metavar": "BYTES", "help": "Memory for KV pages and adapters, such as 512MiB."}),
    (
        "--device-memory",
        {
            "metavar": "BYTES",
            "help": "Total device memory, weights included; set it if the models do not all fit.",
        },
    ),
    (
        "--adapter-memory",
        {
            "metavar": "MIN:MAX",
            "help": "Part of --memory that adapters may use, such as 64MiB:256MiB.",
        },
    ),
    ("--host-adapter-memory", {"metavar": "BYTES"}),
    (
        "--adapter-cache",
        {"metavar": "BYTES", "help": "Disk space for packed adapters on the worker."},
    ),
    ("--max-num-seqs", {"type": int}),
    ("--max-batched-tokens", {"type": int}),
    ("--max-model-len", {"type": int}),
)
UPLOADS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--max-lora-rank", {"type": int, "help": "Maximum rank of an uploaded adapter."}),
)


def settings_options(*groups: tuple[tuple[str, dict[str, Any]], ...]) -> Callable[[F], F]:
    """Adds --config and the options of these groups, which `settings_of` reads."""

    def decorate(command: F) -> F:
        for group in reversed((*groups, PLACE)):
            for name, details in reversed(group):
                command = click.option(name, **details)(command)
        config = click.Path(path_type=Path, dir_okay=False)
        return click.option("--config", type=config, help="TOML file with settings.")(command)

    return decorate


def settings_of(flags: dict[str, Any]) -> Settings:
    """Returns the settings, and removes from `flags` those that it has used."""
    file = flags.pop("config", None)
    known = {name: flags.pop(name) for name in list(flags) if name in Settings.__struct_fields__}
    return load_settings(known, file=file)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(
        command
    )


def list_options(command: F) -> F:
    """Adds the options of a list. The command takes `form` and passes it to `show_list`."""
    command = click.option(
        "--wide",
        "form",
        flag_value="wide",
        help="Print all columns, whatever the width of the terminal.",
    )(command)
    return click.option("--json", "form", flag_value="json", help="Print JSON instead of a table.")(
        command
    )


def tenant_option(command: F) -> F:
    return click.option("--tenant", help="Tenant name or id. Not needed with a tenant key.")(
        command
    )


def yes_option(command: F) -> F:
    """Adds --yes. The command takes `yes` and passes it to `confirm`."""
    return click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def confirm(question: str, yes: bool) -> None:
    """Asks a question unless `yes` is set. Raises Abort if the answer is no."""
    if not yes:
        click.confirm(question, abort=True, err=True)


def pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """Returns the values of a repeatable KEY=VALUE option. Raises UsageError."""
    found: dict[str, str] = {}
    for number, text in enumerate(given, 1):
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.UsageError(f"{option} number {number}: {text!r} is not KEY=VALUE")
        found[key] = value
    return found


def moment(text: str, *, ahead: bool = False) -> str:
    """Returns a time in the server's format, from a date, a time, or a span such as 24h or 30d
    before now, or after now if `ahead` is set. Raises UsageError."""
    span = SPAN.fullmatch(text)
    if span is not None:
        length = int(span[1]) * (timedelta(hours=1) if span[2] == "h" else timedelta(days=1))
        found = datetime.now(UTC) + (length if ahead else -length)
    else:
        try:
            found = datetime.fromisoformat(text)
            found = found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            raise click.UsageError(
                f"{text!r} is neither 24h, 30d nor a date such as 2027-01-31 or 2027-01-31T09:00"
            ) from error
    return found.isoformat().replace("+00:00", "Z")


def from_json(text: str) -> Any:
    """Parses JSON without NaN and infinity, which cannot be sent. Raises ValueError."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def route(*names: str) -> str:
    """Returns a path of the admin plane. Raises UsageError if a name would lead to another
    route."""
    for name in names:
        if name in ("", ".", ".."):
            raise click.UsageError(f"{name!r} is no name")
    return "/admin/v1/" + "/".join(quote(name, safe="") for name in names)


@contextmanager
def api() -> Iterator[Api]:
    """Connects to the running server with the settings of the environment."""
    # Imported here because it is slow, and commands without a server do not need it.
    from loraplex.api import connect

    with connect(load_settings({})) as found:
        yield found
