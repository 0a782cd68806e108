"""Reads an adapter's serving data from the files that training tools leave next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from loraplex.errors import ApiFailure

TEMPLATE_NAME, TOKENIZER_NAME = "chat_template.jinja", "tokenizer_config.json"
GENERATION_NAME = "generation_config.json"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters in generation_config.json that a version's defaults can contain."""


def read_folder_serving(folder: Path) -> dict[str, Any]:
    """Returns the chat template, defaults and end tokens from the folder's files, in the form of an
    upload's field `folder_serving`. Raises ApiFailure for files that are not JSON."""
    found: dict[str, Any] = {}
    if template := _chat_template(folder):
        found["chat_template"] = template
    generation = read_json(folder / GENERATION_NAME)
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


def _chat_template(folder: Path) -> str | None:
    """Returns the text of chat_template.jinja if the folder has this file, as transformers does.
    Otherwise returns the template in tokenizer_config.json, which is the one named `default` if
    there are several. Returns None if there is no template."""
    if (folder / TEMPLATE_NAME).is_file():
        return _text(folder / TEMPLATE_NAME)
    template = read_json(folder / TOKENIZER_NAME).get("chat_template")
    if isinstance(template, list):
        entries = [each for each in cast(list[Any], template) if isinstance(each, dict)]
        return {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    return template


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
