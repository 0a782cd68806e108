"""Reads the chat templates of a folder as transformers does, and joins them to one. Torch-free.

A folder may have several templates with names. transformers renders a conversation with `tool_use`
if it has tools, and with `default` otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

FILE = "chat_template.jinja"
"""Name of the file with the template `default`."""
FOLDER = "additional_chat_templates"
"""Name of the folder with the other templates, one file each."""
DEFAULT, TOOL_USE = "default", "tool_use"
ONLY_FOR_TOOLS = (
    "{{ raise_exception('this model has a chat template only for conversations with tools') }}"
)


def read_templates(folder: Path, embedded: object) -> dict[str, str]:
    """Returns the texts of a folder's chat templates by name. `embedded` is the value of
    `chat_template` in the tokenizer's configuration, which is used only if the folder has no file
    of a template. Raises UnicodeDecodeError for a file that is not UTF-8."""
    files = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        files[DEFAULT] = folder / FILE
    if files:
        return {name: path.read_text("utf-8") for name, path in files.items()}
    if isinstance(embedded, str):
        return {DEFAULT: embedded}
    named: Mapping[Any, Any] = {}
    if isinstance(embedded, dict):
        named = cast(Mapping[Any, Any], embedded)
    elif isinstance(embedded, list):
        entries = [each for each in cast(list[Any], embedded) if isinstance(each, dict)]
        named = {each.get("name"): each.get("template") for each in entries}
    return {
        name: text
        for name, text in named.items()
        if isinstance(name, str) and isinstance(text, str)
    }


def join_templates(templates: Mapping[str, str]) -> str | None:
    """Returns one template that renders as transformers does with the named templates. Returns None
    if it would use none of them."""
    default, tool_use = templates.get(DEFAULT), templates.get(TOOL_USE)
    if tool_use is None:
        return default
    # Jinja removes the newline after a block's tag and the one at a template's end. The plus sign
    # keeps the spaces before the tag.
    with_tools = tool_use.removesuffix("\n")
    without = (ONLY_FOR_TOOLS if default is None else default).removesuffix("\n")
    return "{% if tools is not none %}\n" + with_tools + "{%+ else %}\n" + without + "{%+ endif %}"


def name_unused_templates(templates: Mapping[str, str]) -> list[str]:
    """Returns sentences that name the templates that `join_templates` does not use."""
    unused = sorted(name for name in templates if name not in (DEFAULT, TOOL_USE))
    return [f"chat templates not used: {', '.join(unused)}"] if unused else []
