"""Represents a JSON Schema as a graph in which references lead to their targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

from gateway.text.longest_path import longest_path

Container = dict[str, Any] | list[Any]


class SchemaGraph:
    """Graph of the lists and objects of one schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._containers = {id(container): container for container in _containers(schema)}
        self._names: dict[str, Any] = {}
        """Parts of the schema by their `$id`, or by their `$anchor` with a `#` before it."""
        self.patterns: list[str] = []
        for container in self._containers.values():
            if isinstance(container, dict):
                self._index(container)

    def longest_path(self) -> int:
        """Returns the number of lists, objects and references on the longest path."""
        return longest_path(self._containers, self._followers, lambda _: 1)

    def _index(self, part: dict[str, Any]) -> None:
        if isinstance(name := part.get("$id"), str):
            self._names[name] = part
        if isinstance(name := part.get("$anchor"), str):
            self._names[f"#{name}"] = part
        if isinstance(pattern := part.get("pattern"), str):
            self.patterns.append(pattern)
        if isinstance(patterns := part.get("patternProperties"), dict):
            self.patterns += cast("dict[str, Any]", patterns)

    def _followers(self, key: int) -> Iterator[int]:
        container = self._containers[key]
        if isinstance(container, list):
            values = container
        else:
            values = [*container.values(), self._target(container.get("$ref"))]
        return (id(value) for value in values if id(value) in self._containers)

    def _target(self, reference: Any) -> Any:
        """Returns the part of the schema that a `$ref` points to. Returns None if there is no such
        part."""
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._names.get(f"#{fragment}")
        part = self._names.get(base) if base else self._root
        for name in unquote(fragment).split("/")[1:]:
            part = _child(part, name.replace("~1", "/").replace("~0", "~"))
        return part


def _child(part: Container | None, name: str) -> Any:
    if isinstance(part, dict):
        return part.get(name)
    if isinstance(part, list) and name.isdecimal() and len(name) < 9 and int(name) < len(part):
        return part[int(name)]
    return None


def _containers(value: Any) -> Iterator[Container]:
    """Yields all lists and objects in a JSON value, including the value itself."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            part = cast("dict[str, Any]", found)
            waiting += part.values()
            yield part
        elif isinstance(found, list):
            items = cast("list[Any]", found)
            waiting += items
            yield items
