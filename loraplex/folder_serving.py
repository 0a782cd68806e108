"""Reads an adapter's serving data from the files that training tools leave next to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from adapters.format.chat_templates import (
    join_templates,
    name_unused_templates,
    read_templates,
)
from adapters.format.generation_fields import name_generation_fields
from loraplex.errors import ApiFailure

TOKENIZER_NAME = "tokenizer_config.json"
GENERATION_NAME = "generation_config.json"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters in generation_config.json that a version's defaults can contain."""


def read_folder_serving(
    folder: Path, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Returns the chat template, defaults and end tokens from the folder's files, in the form of an
    upload's field `folder_serving`. Passes sentences about what is not used to `tell`. Raises
    ApiFailure for files that are not JSON."""
    found: dict[str, Any] = {}
    if template := _chat_template(folder, tell):
        found["chat_template"] = template
    generation = read_json(folder / GENERATION_NAME)
    for sentence in name_generation_fields(generation):
        tell(f"{folder}: {sentence}")
    defaults = {name: generation[name] for name in DEFAULTS if generation.get(name) is not None}
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0
    if defaults:
        found["defaults"] = defaults
    ends = generation.get("eos_token_id")
    if ends is not None:
        found["stop_token_ids"] = ends if isinstance(ends, list) else [ends]
    return found


def describe_taken(version: dict[str, Any], found: dict[str, Any], given: dict[str, Any]) -> str:
    """Returns a list, as text, of the serving data that a version has from its folder, or an empty
    text. `found` is the folder's serving data (chat template, defaults, stop tokens). `given` is
    the serving data that the upload set, which takes precedence."""
    serving, taken = version["serving"], list[str]()
    template = serving["template"]
    if template and template["text"] == found.get("chat_template") != given.get("chat_template"):
        taken.append("the chat template")
    named = given.get("defaults", {})
    for name, value in found.get("defaults", {}).items():
        if name not in named and serving["defaults"].get(name) == value:
            taken.append(f"{name} {value}")
    if not given.get("stop_token_ids") and serving["stop_token_ids"]:
        taken.append(f"stop token ids {', '.join(map(str, serving['stop_token_ids']))}")
    return ", ".join(taken)


def _chat_template(folder: Path, tell: Callable[[str], None]) -> str | None:
    """Returns the folder's chat template, or None if it has none. Passes sentences about templates
    that are not used to `tell`. Raises ApiFailure for a template that is not UTF-8."""
    embedded = read_json(folder / TOKENIZER_NAME).get("chat_template")
    try:
        templates = read_templates(folder, embedded)
    except UnicodeDecodeError as error:
        raise ApiFailure(f"a chat template in {folder} is not UTF-8: {error}") from None
    for sentence in name_unused_templates(templates):
        tell(f"{folder}: {sentence}")
    return join_templates(templates)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one if there is no file. Raises ApiFailure."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ApiFailure(f"{path} is not JSON: {error}") from None
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ApiFailure(f"{path} is not UTF-8: {error}") from None
