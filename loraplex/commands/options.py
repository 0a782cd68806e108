"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import quote

import click
import msgspec

from loraplex.settings import BYTES, MemoryRange, Settings, load_settings, nested
from loraplex.tables import size

if TYPE_CHECKING:
    from loraplex.api import Api

SPAN = re.compile(r"(\d{1,5})([hd])", re.ASCII)
F = TypeVar("F", bound=Callable[..., Any])

PLACE = ("data_dir",)
SERVING = (
    *("host", "port", "management_host", "management_port"),
    *("tls_certificate", "tls_key"),
)
TRANSPORT = ("insecure_transport",)
WORKING = (
    *("device", "dtype", "ops", "threads", "memory", "device_memory", "adapter_memory"),
    *("host_adapter_memory", "adapter_cache", "max_num_seqs", "max_batched_tokens"),
    "max_model_len",
)
UPLOADS = ("max_lora_rank",)


class WholeNumber(click.IntRange):
    name = "whole number"


class Number(click.FloatRange):
    """Range of numbers that excludes `nan`, which click accepts in every range."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail("this is not a number", param, ctx)
        return found


def settings_options(*groups: Sequence[str]) -> Callable[[F], F]:
    """Returns a decorator that adds --config and an option for each setting that `groups` name.
    `settings_of` reads the options."""

    def decorate(command: F) -> F:
        names = [name for group in (*groups, PLACE) for name in group]
        config = click.Path(path_type=Path, dir_okay=False)
        option = click.option("--config", type=config, help="TOML file with settings.")
        return option(struct_options(Settings, *names)(command))

    return decorate


def struct_options(
    struct: type[msgspec.Struct], *names: str, flags: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Returns a decorator that adds an option for each field of a struct in `names`, with the
    field's type, bounds, default and docstring. The option's value is None unless the user gives
    it. `flags` maps a field to its option, if the option is not named like the field."""
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    texts = _docstrings(struct)

    def decorate(command: F) -> F:
        for name in reversed(names):
            flag = (flags or {}).get(name, f"--{name.replace('_', '-')}")
            details = _option_details(fields[name], texts.get(name, ""))
            command = click.option(flag, name, **details)(command)
        return command

    return decorate


def _option_details(field: msgspec.structs.FieldInfo, text: str) -> dict[str, Any]:
    """Returns the arguments of `click.option` for a field. The help is the description in the
    field's type, or `text` if there is none."""
    kinds, default = list(nested(field.type)), field.default
    metas = [kind for kind in kinds if isinstance(kind, msgspec.Meta)]
    text = next((meta.description for meta in metas if meta.description), text)
    lows = [low for meta in metas for low in (meta.ge, meta.gt) if low is not None]
    highs = [meta.le for meta in metas if meta.le is not None]
    bounds: dict[str, Any] = {"min": min(lows, default=None), "max": min(highs, default=None)}
    details: dict[str, Any] = {}
    if is_size := any(meta.extra == BYTES for meta in metas):
        details["metavar"] = "BYTES"
    elif MemoryRange in kinds:
        details["metavar"] = "MIN:MAX"
    elif Path in kinds:
        details["type"] = click.Path(path_type=Path)
    elif choices := [get_args(kind) for kind in kinds if get_origin(kind) is Literal]:
        details["type"] = click.Choice(choices[0])
    elif bool in kinds:
        details |= {"is_flag": True, "default": None}
    elif int in kinds:
        details |= {"type": WholeNumber(**bounds) if lows else int, "metavar": "NUMBER"}
    elif float in kinds:
        is_open = any(meta.gt is not None for meta in metas)
        details |= {"type": Number(**bounds, min_open=is_open), "metavar": "NUMBER"}
    if isinstance(default, str | int | float | Path) and not isinstance(default, bool):
        if is_size:
            default = size(int(default))  # pyright: ignore[reportArgumentType]
        shown = f"{default:g}" if isinstance(default, float) else default
        text = f"{text.rstrip('.')} (default: {shown})."
    return details | {"help": text}


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings of a class's attributes by name, each in one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for pair in pairwise(tree.body):
        match pair:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def settings_of(flags: dict[str, Any]) -> Settings:
    """Loads the settings. Settings in `flags` take precedence, and are removed from `flags`."""
    file = flags.pop("config", None)
    known = {name: flags.pop(name) for name in list(flags) if name in Settings.__struct_fields__}
    return load_settings(known, file=file)


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


def pairs(option: str, given: tuple[str, ...], form: str = "KEY=VALUE") -> dict[str, str]:
    """Returns the KEY=VALUE pairs of a repeatable option as a dict. Error messages describe a pair
    as `form`. Raises UsageError."""
    found: dict[str, str] = {}
    for number, text in enumerate(given, 1):
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.UsageError(f"{option} number {number}: {text!r} is not {form}")
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
    """Returns a path of the admin plane. Raises UsageError for names that would lead to another
    route, such as `..`."""
    for name in names:
        if name in ("", ".", ".."):
            raise click.UsageError(f"{name!r} cannot be a name")
    return "/admin/v1/" + "/".join(quote(name, safe="") for name in names)


def api() -> Api:
    """Returns a client of the running server, by the settings of the environment. It is closed when
    the command ends."""
    # Imported here, because this import is slow and commands without a server do not need it.
    from loraplex.api import connect

    return click.get_current_context().with_resource(connect(load_settings({})))
