"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args
from urllib.parse import quote

import click
import msgspec

from loraplex.output import set_form
from loraplex.settings import Settings, load_settings
from loraplex.tables import size

if TYPE_CHECKING:
    from loraplex.api import Api

SPAN = re.compile(r"(\d{1,5})([hd])", re.ASCII)
F = TypeVar("F", bound=Callable[..., Any])

Options = Mapping[str, str]
"""Help text of each setting that is an option. The option's type and default come from the field in
`Settings`."""

PLACE: Options = {"data_dir": "Folder of everything that is stored."}
SERVING: Options = {
    "host": "Address to listen on.",
    "port": "Port to listen on. 0 chooses a free one.",
    "management_host": "Address for metrics, and for the admin plane if --host is public.",
    "management_port": "Port for metrics (default: 8002, or a free one).",
    "tls_certificate": "PEM file with the certificate for TLS on --port.",
    "tls_key": "PEM file with the key for TLS on --port.",
}
TRANSPORT: Options = {"insecure_transport": "Connect to workers over tcp:// without TLS."}
WORKING: Options = {
    "device": "Device of the worker: auto, cpu or cuda.",
    "dtype": "Precision of weights and KV pages: bfloat16 or float32.",
    "ops": "Kernels: cpu, reference or cuda (default: those of --device).",
    "threads": "Number of threads that compute (default: one for each core).",
    "memory": "Memory for KV pages and adapters, such as 512MiB.",
    "device_memory": "Total device memory, weights included; set it if the models do not all fit.",
    "adapter_memory": "Part of --memory that adapters may use, such as 64MiB:256MiB.",
    "host_adapter_memory": "Host memory for packed adapters that are not on the device.",
    "adapter_cache": "Disk space for packed adapters on the worker.",
    "max_num_seqs": "Maximum number of sequences that run at once.",
    "max_batched_tokens": "Maximum tokens of a step (default: 512 on a CPU, 2048 on a GPU).",
    "max_model_len": "Maximum tokens of prompt and answer together (default: the model's).",
}
UPLOADS: Options = {"max_lora_rank": "Maximum rank of an uploaded adapter."}
SIZES = ("memory", "device_memory", "host_adapter_memory", "adapter_cache")
FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}


def settings_options(*groups: Options) -> Callable[[F], F]:
    """Returns a decorator that adds --config and the options of these groups. `settings_of` reads
    them."""

    def decorate(command: F) -> F:
        for group in reversed((*groups, PLACE)):
            for name, text in reversed([*group.items()]):
                command = _setting_option(name, text)(command)
        config = click.Path(path_type=Path, dir_okay=False)
        return click.option("--config", type=config, help="TOML file with settings.")(command)

    return decorate


def _setting_option(name: str, text: str) -> Callable[[F], F]:
    """Returns a decorator that adds the option of a setting. The option's value is None unless the
    user gives it."""
    field, details = FIELDS[name], dict[str, Any]()
    outer: list[Any] = [field.type, *get_args(field.type)]
    kinds: list[Any] = outer + [kind for each in outer for kind in get_args(each)]
    if name in SIZES:
        details["metavar"] = "BYTES"
    elif name == "adapter_memory":
        details["metavar"] = "MIN:MAX"
    elif Path in kinds:
        details["type"] = click.Path(path_type=Path)
    elif bool in kinds:
        details |= {"is_flag": True, "default": None}
    elif int in kinds:
        details["type"] = int
    default: Any = size(field.default) if name in SIZES and field.default else field.default
    if isinstance(default, str | int | Path) and not isinstance(default, bool):
        text = f"{text.rstrip('.')} (default: {default})."
    return click.option(f"--{name.replace('_', '-')}", help=text, **details)


def settings_of(flags: dict[str, Any]) -> Settings:
    """Returns the settings, and removes the flags that are settings from `flags`."""
    file = flags.pop("config", None)
    known = {name: flags.pop(name) for name in list(flags) if name in Settings.__struct_fields__}
    return load_settings(known, file=file)


def form_option(name: str, help: str) -> Callable[[F], F]:
    """Returns a decorator that adds a flag for the format in which the command prints."""
    return click.option(name, is_flag=True, expose_value=False, callback=set_form, help=help)


def json_option(command: F) -> F:
    return form_option("--json", "Print JSON instead of text.")(command)


def list_options(command: F) -> F:
    command = form_option("--wide", "Print all columns, whatever the width of the terminal.")(
        command
    )
    return form_option("--json", "Print JSON instead of a table.")(command)


def tenant_option(command: F) -> F:
    return click.option("--tenant", help="Tenant name or id. Not needed with a tenant key.")(
        command
    )


def yes_option(command: F) -> F:
    """Adds the flag --yes to a command. The command passes its argument `yes` to `confirm`."""
    return click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def confirm(question: str, yes: bool) -> None:
    """Asks a question unless `yes` is set. Raises Abort if the answer is no."""
    if not yes:
        click.confirm(question, abort=True, err=True)


def pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """Returns the values of a repeatable option KEY=VALUE. Raises UsageError."""
    found: dict[str, str] = {}
    for number, text in enumerate(given, 1):
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.UsageError(f"{option} number {number}: {text!r} is not KEY=VALUE")
        found[key] = value
    return found


def moment(text: str, *, ahead: bool = False) -> str:
    """Returns a time in the server's format. `text` is a date, a time, or a span such as 24h or
    30d, which is subtracted from the current time, or added to it if `ahead` is set. Raises
    UsageError."""
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
    # Imported here, because this import is slow and commands without a server do not need it.
    from loraplex.api import connect

    with connect(load_settings({})) as found:
        yield found
