"""Rewrites JSON Schemas, for example from pydantic, zod or OpenAPI documents, so that answers can
be constrained to them.

Removes keywords that cannot be enforced during generation. Replaces `oneOf` by `anyOf` if no value
can match two of its branches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from gateway.text.closed_schemas import closed_schema
from gateway.text.schema_parts import (
    SCHEMAS,
    SCHEMAS_BY_NAME,
    SCHEMAS_IN_LISTS,
    Node,
    as_items,
    as_node,
    find_place,
    with_maps,
)

NOTHING: Mapping[str, tuple[Any, ...]] = {
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": ({}, True),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    "then": ({}, True),
    "unevaluatedItems": ({}, True),
    "unevaluatedProperties": ({}, True),
    "uniqueItems": (False,),
}
"""Keywords that cannot be enforced, each with the values for which removing the keyword changes
nothing."""
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Values of `format` that are enforced. Any other value is treated as an annotation."""
UNSUPPORTED_PATTERN = re.compile(
    r"(\\[1-9bBck]|\(\?<?[=!])|\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)", re.DOTALL
)
"""Matches the next escape, lookaround or character class of a regular expression. Group 1 matches
only a part that cannot be enforced: a back reference, word boundary, lookahead or lookbehind."""
MAX_STEPS = 1 << 15
"""Maximum number of schemas that are visited to compare the branches of all unions in a schema.
Nested unions can have exponentially many branches."""
MAX_NESTED = 32
"""Maximum depth of nested references and unions that are followed from a branch of a union."""


class HeldSchema(NamedTuple):
    """JSON Schema without the keywords that cannot be enforced. Compiling it may still fail."""

    text: str
    dropped: frozenset[str]
    """Keywords that were removed."""


def held_schema(schema: str, *, is_strict: bool, is_closed: bool = False) -> HeldSchema:
    """Returns a JSON Schema without the keywords that cannot be enforced. If `is_closed` is set,
    objects have only the properties that the schema declares (see `closed_schema`). If `is_strict`
    is set, and removing a keyword other than `format` changes which values the schema accepts,
    raises ValueError with the name of the keyword. Also raises ValueError if a schema is too large
    to be closed."""
    given = with_maps(json.loads(schema))
    reader = SchemaReader(closed_schema(given) if is_closed else given)
    if is_strict and (unenforced := sorted(reader.dropped - {"format"})):
        raise ValueError(
            f"'{unenforced[0]}' cannot be enforced while an answer is generated. Leave it out, or "
            "leave out 'strict': then it is dropped"
        )
    return HeldSchema(json.dumps(reader.schema), frozenset(reader.dropped))


class SchemaReader:
    """Rewriter of one schema. Changes the schema in place, and follows references without
    recursion."""

    def __init__(self, schema: Any) -> None:
        self.dropped: set[str] = set()
        self._root: Node = {"schema": schema}
        self._unions: list[Node] = []
        self._num_steps = 0
        for node in self._nodes():
            self._change(node)
        for node in self._unions:
            self._change_union(node)

    @property
    def schema(self) -> Any:
        return self._root["schema"]

    def _nodes(self) -> Iterator[Node]:
        """Yields every schema object once, including objects that are reached only through a
        `$ref`."""
        seen: set[int] = set()
        places: list[tuple[Any, Any]] = [(self._root, "schema")]
        while places:
            holder, key = places.pop()
            node = as_node(holder[key])
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            if node.get("not") in ({}, True):
                holder[key] = False
                continue
            yield node
            places += _children(node)
            if (place := find_place(self._root, node.get("$ref"))) is not None:
                places.append(place)

    def _change(self, node: Node) -> None:
        for keyword in NOTHING.keys() & node.keys():
            if node.pop(keyword) not in NOTHING[keyword]:
                self.dropped.add(keyword)
        self._drop(node, "format", lambda name: str(name) not in FORMATS)
        self._drop(node, "pattern", _is_unsupported)
        if _has_optional_properties(node):
            self._drop(node, "minProperties")
            self._drop(node, "maxProperties")
        _change_bounds(node)
        if node.pop("nullable", None) is True:
            _allow_null(node)
        if "oneOf" in node:
            self._unions.append(node)

    def _drop(
        self, node: Node, keyword: str, is_unenforced: Callable[[Any], bool] = lambda _: True
    ) -> None:
        if keyword in node and is_unenforced(node[keyword]):
            del node[keyword]
            self.dropped.add(keyword)

    def _change_union(self, node: Node) -> None:
        """Replaces `oneOf` by `anyOf` if no value matches two branches, because `oneOf` and `anyOf`
        then accept the same values."""
        branches = as_items(node["oneOf"])
        discriminator = as_node(node.get("discriminator")) or {}
        if not self._differ(branches, discriminator.get("propertyName")):
            return
        members = node.get("allOf", [])
        if "anyOf" not in node:
            node["anyOf"] = branches
        elif isinstance(members, list):
            node["allOf"] = [*cast(list[Any], members), {"anyOf": branches}]
        else:
            return  # The compiler refuses the invalid `allOf` later.
        del node["oneOf"]

    def _differ(self, branches: list[Any], tag: Any) -> bool:
        """Returns whether no value matches two branches. If the discriminator property `tag`
        separates the branches, makes `tag` required in each branch."""
        if _are_apart(self._values(branch) for branch in branches):
            return True
        types = [self._types(branch) for branch in branches]
        objects = [branch for branch, kinds in zip(branches, types, strict=True) if kinds == OBJECT]
        others = [kinds for kinds in types if kinds != OBJECT]
        if not _are_apart([*others, *([OBJECT] if objects else [])]):
            return False
        if len(objects) < 2:
            return True
        if isinstance(tag, str):
            constants = [self._constants(branch, tag, must=False) for branch in objects]
            if _are_apart(constants):
                for branch in objects:
                    self._require(branch, tag)
                return True
        return any(
            _are_apart(self._constants(branch, name, must=True) for branch in objects)
            for name in self._names(objects[0])
        )

    def _leaves(self, branch: Any, depth: int = 0) -> Iterator[Node | None]:
        """Yields the alternatives of a branch, after following references and nested unions. Yields
        None for an alternative that allows any value, or that is nested too deeply to be
        followed."""
        self._num_steps += 1
        node = as_node(branch)
        if node is None or depth > MAX_NESTED or self._num_steps > MAX_STEPS:
            yield None
        elif (place := find_place(self._root, node.get("$ref"))) is not None:
            yield from self._leaves(place[0][place[1]], depth + 1)
        elif union := as_items(node.get("anyOf", node.get("oneOf"))):
            for each in union:
                yield from self._leaves(each, depth + 1)
        else:
            yield node

    def _merged(self, leaf: Node, depth: int = 0) -> Iterator[Node]:
        """Yields a schema and the schemas that its `allOf` includes, up to the limits MAX_NESTED
        and MAX_STEPS."""
        self._num_steps += 1
        if depth > MAX_NESTED or self._num_steps > MAX_STEPS:
            return
        yield leaf
        for member in map(as_node, as_items(leaf.get("allOf"))):
            place = find_place(self._root, (member or {}).get("$ref"))
            found = member if place is None else as_node(place[0][place[1]])
            if found is not None:
                yield from self._merged(found, depth + 1)

    def _values(self, branch: Any) -> frozenset[str] | None:
        """Returns the values that a branch of a union enumerates, as JSON texts. Returns None if
        the branch does not enumerate its values."""
        values: set[str] = set()
        for leaf in self._leaves(branch):
            found = None if leaf is None else _constants_of(leaf)
            if found is None:
                return None
            values |= found
        return frozenset(values)

    def _types(self, branch: Any) -> frozenset[str] | None:
        """Returns the JSON types that a branch of a union allows. Returns None if it allows any
        type."""
        types: set[str] = set()
        for leaf in self._leaves(branch):
            found = None if leaf is None else self._types_of(leaf)
            if found is None:
                return None
            types |= found
        return frozenset(types)

    def _types_of(self, leaf: Node) -> set[str] | None:
        for node in self._merged(leaf):
            if "type" in node:
                names = as_items(node["type"]) or [node["type"]]
                return {"number" if name == "integer" else str(name) for name in names}
            if (values := _constants_of(node)) is not None:
                return {TYPES[type(json.loads(value))] for value in values}
        return None

    def _constants(self, branch: Any, name: str, *, must: bool) -> frozenset[str] | None:
        """Returns the values that a branch enumerates for the property `name`, as JSON texts.
        Returns None if the branch does not enumerate them, or if `must` is set and the property is
        not required."""
        values: set[str] = set()
        for leaf in self._leaves(branch):
            found = None if leaf is None else self._constants_in(leaf, name, must=must)
            if found is None:
                return None
            values |= found
        return frozenset(values)

    def _constants_in(self, leaf: Node, name: str, *, must: bool) -> frozenset[str] | None:
        found, is_required = None, not must
        for node in self._merged(leaf):
            is_required = is_required or name in _required(node)
            if found is None and name in _properties(node):
                found = self._values(_properties(node)[name])
        return found if is_required else None

    def _require(self, branch: Any, name: str) -> None:
        for leaf in self._leaves(branch):
            for node in () if leaf is None else self._merged(leaf):
                if name in _properties(node) and name not in _required(node):
                    node["required"] = [*_required(node), name]

    def _names(self, branch: Any) -> list[str]:
        """Returns the property names of a branch. If it has branches itself, those of the first."""
        leaf = next(self._leaves(branch), None)
        return [] if leaf is None else [n for each in self._merged(leaf) for n in _properties(each)]


OBJECT = frozenset(("object",))
TYPES = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number"}
"""JSON type of each Python type of a JSON value. Integers count as numbers."""


def _children(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yields the container and the key of each subschema."""
    for keyword in SCHEMAS_BY_NAME:
        named = as_node(node.get(keyword)) or {}
        yield from ((named, name) for name in named)
    for keyword in (*SCHEMAS_IN_LISTS, "items"):
        listed = as_items(node.get(keyword))
        yield from ((listed, number) for number in range(len(listed)))
    yield from ((node, keyword) for keyword in SCHEMAS if keyword in node)


def _is_unsupported(pattern: Any) -> bool:
    return isinstance(pattern, str) and any(
        found[1] for found in UNSUPPORTED_PATTERN.finditer(pattern)
    )


def _has_optional_properties(node: Node) -> bool:
    """Returns whether objects that match the schema may have properties that are not required."""
    is_open = node.get("additionalProperties") is not False
    required = {name for name in _required(node) if isinstance(name, str)}
    return is_open and not _properties(node).keys() <= required


def _change_bounds(node: Node) -> None:
    """Converts the boolean exclusive bounds of OpenAPI 3.0 to the numeric ones of JSON Schema."""
    for bound, exclusive in (
        ("minimum", "exclusiveMinimum"),
        ("maximum", "exclusiveMaximum"),
    ):
        is_exclusive = node.get(exclusive)
        if isinstance(is_exclusive, bool):
            del node[exclusive]
            if is_exclusive and bound in node:
                node[exclusive] = node.pop(bound)


def _allow_null(node: Node) -> None:
    """Allows null in addition to the schema's values, as `nullable` does in OpenAPI 3.0."""
    if "type" in node:
        node["type"] = [*(as_items(node["type"]) or [node["type"]]), "null"]
    if "enum" in node:
        node["enum"] = [*as_items(node["enum"]), None]
    keys = ("$ref", "allOf", "anyOf", "oneOf", "discriminator")
    combined = {key: node.pop(key) for key in keys if key in node}
    if combined:
        node["anyOf"] = [combined, {"type": "null"}]


def _constants_of(node: Node) -> frozenset[str] | None:
    """Returns the values that a schema enumerates, as JSON texts. Returns None if the schema does
    not enumerate its values, or one of them is a list or an object."""
    values = [node["const"]] if "const" in node else as_items(node.get("enum"))
    if not values or any(type(value) not in TYPES for value in values):
        return None
    return frozenset(json.dumps(_whole(value)) for value in values)


def _whole(value: Any) -> Any:
    """Returns 1 for 1.0, because JSON Schema treats them as the same value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _are_apart(sets: Iterable[frozenset[str] | None]) -> bool:
    """Returns whether no two of the sets share an element. A set that is None is unknown, and may
    share an element with any other set."""
    found: set[str] = set()
    for each in sets:
        if each is None or not found.isdisjoint(each):
            return False
        found |= each
    return True


def _properties(node: Node) -> Node:
    return as_node(node.get("properties")) or {}


def _required(node: Node) -> list[Any]:
    return as_items(node.get("required"))
