"""Names the keywords under which a JSON Schema contains other schemas, and resolves references."""

from __future__ import annotations

from typing import Any, cast

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SCHEMAS_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalItems", "additionalProperties")

Node = dict[str, Any]


def find_place(root: Node, reference: Any) -> tuple[Any, Any] | None:
    """Returns the container (a list or an object) and the key of the part of a schema that a
    reference points to. Returns None if the reference does not point to a part of the schema.
    `root`: object that contains the schema under the key `schema`."""
    if not isinstance(reference, str) or reference.partition("/")[0] != "#":
        return None
    holder: Any = root
    key: Any = "schema"
    for part in reference.split("/")[1:]:
        found = holder[key]
        names, items = as_node(found) or {}, as_items(found)
        key = part.replace("~1", "/").replace("~0", "~")
        if key.isdecimal() and int(key[:9]) < len(items):
            holder, key = items, int(key)
        elif key in names:
            holder = names
        else:
            return None
    return holder, key


def with_maps(schema: Any) -> Any:
    """Replaces [] by {} wherever a JSON Schema has an object, because that is how PHP
    writes an empty object. Changes the schema in place and returns it."""
    waiting = [schema]
    while waiting:
        node = as_node(waiting.pop()) or {}
        for keyword in (*SCHEMAS_BY_NAME, *SCHEMAS):
            if node.get(keyword) == [] and keyword != "items":
                node[keyword] = {}
        for keyword in SCHEMAS_BY_NAME:
            named = as_node(node.get(keyword)) or {}
            named.update({name: {} for name, value in named.items() if value == []})
            waiting += named.values()
        waiting += [node[keyword] for keyword in SCHEMAS if keyword in node]
        waiting += [each for keyword in SCHEMAS_IN_LISTS for each in as_items(node.get(keyword))]
    return schema


def as_node(value: Any) -> Node | None:
    """Returns the value if it is a JSON object, and None otherwise."""
    return cast(Node, value) if isinstance(value, dict) else None


def as_items(value: Any) -> list[Any]:
    """Returns the value if it is a list, and an empty list otherwise."""
    return cast(list[Any], value) if isinstance(value, list) else []
