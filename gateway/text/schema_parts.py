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


def as_node(value: Any) -> Node | None:
    """Returns the value if it is a JSON object, and None otherwise."""
    return cast(Node, value) if isinstance(value, dict) else None


def as_items(value: Any) -> list[Any]:
    """Returns the value if it is a list, and an empty list otherwise."""
    return cast(list[Any], value) if isinstance(value, list) else []
