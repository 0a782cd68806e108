"""Serving data of a base model itself, from its folder in the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import msgspec

from store.records import GenerationDefaults, ServingData


class OwnServing(msgspec.Struct, frozen=True):
    """Chat template, default parameters and end tokens of a base model."""

    chat_template: str | None
    defaults: dict[str, Any]
    stop_token_ids: frozenset[int]


def read_own_serving(folder: Path) -> OwnServing:
    """Reads a base model's serving data from the files with which it was imported."""
    config, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
    ends = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    template = folder / "chat_template.jinja"
    return OwnServing(
        template.read_text() if template.is_file() else None, generation, frozenset(ends)
    )


def add_found(serving: ServingData, found: ServingData, own: OwnServing) -> ServingData:
    """Returns an upload's serving data, completed with the values `found` in the adapter's folder.
    Uses a found value if the upload has none and the base model (`own`) has another value."""
    template = serving.chat_template
    if template is None and _as_rendered(found.chat_template) != _as_rendered(own.chat_template):
        template = found.chat_template
    given = msgspec.structs.asdict(serving.defaults)
    defaults = {
        name: value
        for name, value in msgspec.structs.asdict(found.defaults).items()
        if value is not None and given[name] is None and own.defaults.get(name) != value
    }
    ends = tuple(id for id in found.stop_token_ids if id not in own.stop_token_ids)
    return msgspec.structs.replace(
        serving,
        chat_template=template,
        defaults=msgspec.convert(given | defaults, GenerationDefaults),
        stop_token_ids=serving.stop_token_ids or ends,
    )


def _as_rendered(template: str | None) -> str | None:
    """Returns a template as Jinja reads it, without the newline at its end."""
    return None if template is None else template.removesuffix("\n")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    """Returns token ids as a list. `value` is one id or a list of ids."""
    values = cast(list[Any], value) if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int)]
