"""Finds out of which JSON types a value may be by a schema, to read arguments that a model writes
as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gateway.text.schema_parts import Node, as_items, as_node, find_place

ALL = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
MAX_PARTS = 256
"""Maximum number of parts of a schema that are visited for one value. References and unions can
make a small schema very large."""
KEYWORDS = {"properties": "object", "additionalProperties": "object", "items": "array"}
"""Keywords that imply a type in a schema that names none."""


class SchemaTypes:
    """Types of the values of an object by its JSON Schema, in which references are resolved."""

    def __init__(self, schema: Node) -> None:
        self._root: Node = {"schema": schema}
        self._num_left = MAX_PARTS

    def of_property(self, name: str) -> frozenset[str]:
        """Returns the types that the property `name` may have. Returns `ALL` if the schema does not
        limit them."""
        self._num_left = MAX_PARTS
        types = ALL
        for schema in list(self._properties(self._root["schema"], name)):
            types &= self._types(schema)
        return types

    def _properties(self, schema: Any, name: str) -> Iterator[Any]:
        """Yields the schemas of a property that hold together. Those of alternatives are yielded as
        one union."""
        node = self._visit(schema)
        named, others = as_node(node.get("properties")) or {}, node.get("additionalProperties")
        if name in named:
            yield named[name]
        elif isinstance(others, dict):
            yield others
        for part in self._joined(node):
            yield from self._properties(part, name)
        for branches in _unions(node):
            found = [each for branch in branches for each in self._properties(branch, name)]
            if found:
                yield {"anyOf": found}

    def _types(self, schema: Any) -> frozenset[str]:
        node = self._visit(schema)
        types = _named_types(node)
        for part in self._joined(node):
            types &= self._types(part)
        for branches in _unions(node):
            types &= frozenset[str]().union(*map(self._types, branches))
        return types | {"null"} if node.get("nullable") is True else types

    def _visit(self, schema: Any) -> Node:
        """Returns the schema, or an empty one, which allows everything, if it is no object or too
        many parts were visited."""
        self._num_left -= 1
        return (as_node(schema) or {}) if self._num_left >= 0 else {}

    def _joined(self, node: Node) -> Iterator[Any]:
        """Yields the schemas that hold in addition to the keywords of `node`."""
        yield from as_items(node.get("allOf"))
        if place := find_place(self._root, node.get("$ref")):
            holder, key = place
            yield holder[key]


def _unions(node: Node) -> list[list[Any]]:
    return [
        as_items(node[keyword]) for keyword in ("anyOf", "oneOf") if as_items(node.get(keyword))
    ]


def _named_types(node: Node) -> frozenset[str]:
    """Returns the types that the keywords of a schema itself allow."""
    types = ALL
    named = node.get("type")
    names = [named] if isinstance(named, str) else as_items(named)
    if names:
        types &= _with_integers(each for each in names if isinstance(each, str))
    elif implied := {kind for keyword, kind in KEYWORDS.items() if keyword in node}:
        types &= implied
    for values in ([node["const"]] if "const" in node else None, node.get("enum")):
        if isinstance(values, list):
            types &= _with_integers(map(type_of, as_items(values)))
    return types


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    found = frozenset(types)
    return found | {"integer"} if "number" in found else found


def type_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
