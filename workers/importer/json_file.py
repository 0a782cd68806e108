"""Reads JSON files of a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.importer.canonical import ImportRefused


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file. Raises ImportRefused if there is no such file or value."""
    if not path.is_file():
        raise ImportRefused(f"{path.name} is missing in {path.parent}")
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ImportRefused(f"{path.name}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ImportRefused if there is none."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ImportRefused(f"{path.name} is no JSON object")
    return value
