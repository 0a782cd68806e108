"""Closes the objects of a JSON Schema, so that an answer has only the properties that the schema
declares.

An object is closed if it declares `properties` and has no keyword about other properties. All
schemas that apply to one value count together: a schema, the members of its `allOf`, the target of
its `$ref`, and one branch of each of its unions. No member is closed alone, because the properties
that another member declares would then be refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.text.schema_parts import (
    SCHEMAS,
    Node,
    as_items,
    as_node,
    find_place,
)

UNIONS = ("anyOf", "oneOf")
CONDITIONS = ("if", "then", "else")
CONDITIONS_BY_NAME = ("dependencies", "dependentRequired", "dependentSchemas")
OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
"""Keywords about properties that `properties` does not name."""
DYNAMIC = ("$dynamicRef", "$recursiveRef")
APPLIED: frozenset[str] = frozenset(
    (
        *("$ref", "allOf", "properties", "required", *UNIONS),
        *(*CONDITIONS, *CONDITIONS_BY_NAME, *OTHERS, *DYNAMIC),
    )
)
"""Keywords that declare properties of a value, or apply another schema to the same value."""
DEFINITIONS = ("$defs", "definitions")
MAX_VISITS = 1 << 17
"""Maximum number of schemas that are visited to close all objects, plus half the number of names
that are written into them, which takes about 0.2 s. A schema that needs more is refused."""
MAX_STEPS = 1 << 15
"""Maximum number of schemas that are visited to close each branch of unions separately. Nested
unions can have exponentially many branches. Beyond this number, an object may have the properties
of all branches of its unions."""


TOO_MANY = (
    "too many {} to refuse undeclared properties. Say 'additionalProperties' in each object, or"
    " simplify the schema"
)


class Around(NamedTuple):
    """Declarations of the schemas that apply to the same value as a branch of a union."""

    names: frozenset[str] = frozenset()
    is_declared: bool = False
    """Whether one of these schemas has the keyword `properties`."""


@dataclass
class Survey:
    """Declarations of all schemas that apply to one value."""

    names: set[str] = field(default_factory=set[str])
    """Properties that are declared or required."""
    is_declared: bool = False
    """Whether one of the schemas has `properties`."""
    is_open: bool = False
    """Whether one of the schemas has a keyword about other properties, or cannot be found."""
    unions: list[list[Any]] = field(default_factory=list[list[Any]])
    """Unions whose branches are not included."""
    visited: set[int] = field(default_factory=set[int])
    """Identities of the schemas."""


def closed_schema(schema: Any) -> Any:
    """Returns a JSON Schema that accepts the same values, except objects with properties that are
    not declared. Raises ValueError if too many schemas would have to be visited, or if too many
    references follow one another."""
    try:
        return _Closing(schema).result()
    except RecursionError:
        raise ValueError(TOO_MANY.format("'$ref' lead from one to the next")) from None


class _Closing:
    """Rewriter of one schema, which it does not change. Each target of a reference becomes a
    definition: closed if it is the value's only schema, and not closed if other schemas apply to
    the same value."""

    def __init__(self, schema: Any) -> None:
        self._root: Node = {"schema": schema}
        self._keeps_definitions = not _are_resolved(self._root)
        """Whether a reference is by anchor or id, so that its target must stay in its place."""
        self._names: dict[tuple[int, bool], str] = {}
        """Names of definitions, by identity of the target and whether it is closed."""
        self._definitions: Node = {}
        self._num_steps = 0
        self._path: set[int] = set()
        """Identities of the schemas whose unions are being closed."""

    def result(self) -> Any:
        schema = self._value(self._root["schema"])
        if not self._definitions:
            return schema
        kept = as_node(schema.get("$defs")) or {}
        return {**schema, "$defs": {**kept, **self._definitions}}

    def _value(self, given: Any) -> Any:
        """Returns the schema of a value, closed."""
        if (node := as_node(given)) is None:
            return given
        applied = {keyword for keyword in node if keyword in APPLIED}
        members = as_items(node.get("allOf"))
        if applied == {"$ref"}:
            return {**self._with_values(node), **self._reference(node["$ref"], is_closed=True)}
        if applied == {"allOf"} and len(members) == 1:
            return {**self._with_values(node), "allOf": [self._value(members[0])]}
        return self._closed(node, Around())

    def _branch(self, given: Any, around: Around) -> Any:
        """Returns a branch of a union, closed together with the schemas around it."""
        if given is False or around == Around():
            return self._value(given)
        return self._closed(as_node(given) or {}, around)

    def _closed(self, node: Node, around: Around) -> Node:
        whole = self._survey(node)
        if whole.is_open:
            return self._part(node, {})
        self._step(len(around.names) + len(whole.names))
        names, is_declared = around.names | whole.names, around.is_declared or whole.is_declared
        unions = [self._survey({"anyOf": union}, follows_unions=True) for union in whole.unions]
        everything = names.union(*[union.names for union in unions])
        if not any(union.is_declared or union.is_open for union in unions):
            part = self._part(node, {})
            return _sealed(part, everything) if is_declared else part
        is_cycle = not whole.visited.isdisjoint(self._path)
        is_too_much = self._num_steps > MAX_STEPS and (names or len(unions) > 1)
        if is_cycle or is_too_much:
            is_open = any(union.is_open for union in unions)
            part = self._part(node, {})
            return part if is_open else _sealed(part, everything)
        arounds: dict[int, Around] = {}
        for number, (branches, union) in enumerate(zip(whole.unions, unions, strict=True)):
            others = unions[:number] + unions[number + 1 :]
            if (union.is_declared or union.is_open) and not any(each.is_open for each in others):
                every = names.union(*[each.names for each in others])
                arounds[id(branches)] = Around(frozenset(every), is_declared)
        added = whole.visited - self._path
        self._path |= added
        part = self._part(node, arounds)
        self._path -= added
        return _without_false(part)

    def _part(
        self, given: Any, arounds: dict[int, Around], inlined: frozenset[int] = frozenset()
    ) -> Any:
        """Returns a schema that is not closed, because other schemas apply to the same value. The
        values of its properties are closed. `arounds` has the unions whose branches are closed, by
        the identity of their lists. Removes those that it finds. `inlined`: identities of the
        targets of references of which this schema is a part."""
        if (node := as_node(given)) is None:
            return given
        part = self._with_values(node)
        for keyword in UNIONS:
            if branches := as_items(node.get(keyword)):
                around = arounds.pop(id(branches), None)
                part[keyword] = [
                    self._part(each, {}) if around is None else self._branch(each, around)
                    for each in branches
                ]
        if members := as_items(node.get("allOf")):
            part["allOf"] = [self._part(member, arounds, inlined) for member in members]
        if (place := find_place(self._root, node.get("$ref"))) is not None:
            target = place[0][place[1]]
            inner = self._survey(target).unions if arounds and id(target) not in inlined else []
            if any(id(union) in arounds for union in inner):
                del part["$ref"]
                whole = self._part(target, arounds, inlined | {id(target)})
                part["allOf"] = [whole, *as_items(part.get("allOf"))]
            else:
                part |= self._reference(node["$ref"], is_closed=False)
        return part

    def _with_values(self, node: Node) -> Node:
        """Returns a copy of a schema, in which the schemas of properties and items are closed."""
        self._step()
        copy = {
            name: value
            for name, value in node.items()
            if self._keeps_definitions or name not in DEFINITIONS
        }
        for keyword in ("properties", "patternProperties"):
            if named := as_node(node.get(keyword)):
                copy[keyword] = {name: self._value(value) for name, value in named.items()}
        for keyword in ("prefixItems", "items"):
            if listed := as_items(node.get(keyword)):
                copy[keyword] = [self._value(value) for value in listed]
        for keyword in SCHEMAS:
            if (inner := as_node(node.get(keyword))) is not None:
                copy[keyword] = self._value(inner)
        return copy

    def _reference(self, reference: Any, *, is_closed: bool) -> Node:
        """Returns a reference to the definition of the same target, and creates the definition if
        there is none yet."""
        place = find_place(self._root, reference)
        if place is None or (place[0] is self._root and is_closed):
            return {"$ref": reference}
        target = place[0][place[1]]
        key = id(target), is_closed
        if (name := self._names.get(key)) is None:
            name = self._names[key] = f"{'closed' if is_closed else 'part'}{len(self._names)}"
            path, self._path = self._path, set()
            made = self._value(target) if is_closed else self._part(target, {})
            self._path, self._definitions[name] = path, made
        return {"$ref": f"#/$defs/{name}"}

    def _step(self, num_names: int = 0) -> None:
        """Counts a schema that is visited or written, and the names that are written into it.
        Raises ValueError if they are too many in all."""
        self._num_steps += 1 + num_names // 2
        if self._num_steps > MAX_VISITS:
            what = "'allOf', '$ref' and unions apply to the same values"
            raise ValueError(TOO_MANY.format(what))

    def _survey(self, schema: Any, *, follows_unions: bool = False) -> Survey:
        """Returns what a schema and the schemas that it applies to the same value declare. Includes
        the branches of unions only if `follows_unions` is set."""
        survey, named = Survey(), Survey()
        conditions = self._visit([schema], survey, follows_unions=follows_unions)
        while conditions:
            conditions = self._visit(conditions, named, follows_unions=True)
        survey.names |= named.names
        survey.is_open |= named.is_open
        return survey

    def _visit(self, schemas: list[Any], survey: Survey, *, follows_unions: bool) -> list[Any]:
        """Adds what the schemas declare to `survey`, unless it has visited them before. Returns the
        schemas of conditions, which name properties but cannot be enforced."""
        waiting, conditions = [*schemas], list[Any]()
        while waiting:
            node = as_node(waiting.pop())
            if node is None or id(node) in survey.visited:
                continue
            survey.visited.add(id(node))
            self._step()
            properties = as_node(node.get("properties"))
            survey.names |= (properties or {}).keys()
            survey.names |= _texts(node.get("required"))
            spoken = [keyword for keyword in (*OTHERS, *DYNAMIC) if keyword in node]
            if node is schemas[0] and node.get("unevaluatedProperties") is False:
                spoken.remove("unevaluatedProperties")
                survey.is_declared = True
            survey.is_declared |= properties is not None
            survey.is_open |= bool(spoken)
            waiting += as_items(node.get("allOf"))
            unions = [union for each in UNIONS if (union := as_items(node.get(each)))]
            if follows_unions:
                waiting += [branch for union in unions for branch in union]
            else:
                survey.unions += unions
            conditions += [node[keyword] for keyword in CONDITIONS if keyword in node]
            for keyword in CONDITIONS_BY_NAME:
                for name, value in (as_node(node.get(keyword)) or {}).items():
                    survey.names |= {name} | _texts(value)
                    conditions.append(value)
            if "$ref" in node:
                place = find_place(self._root, node["$ref"])
                survey.is_open |= place is None
                waiting += [] if place is None else [place[0][place[1]]]
        return conditions


def _sealed(part: Node, names: set[str] | frozenset[str]) -> Node:
    """Returns a schema that refuses properties other than `names`."""
    part = _without_false(part)
    properties = as_node(part.get("properties"))
    further = dict.fromkeys(sorted(names - (properties or {}).keys()), True)
    if properties is not None and not {"$ref", "allOf", *UNIONS} & part.keys():
        return {**part, "properties": {**properties, **further}, "additionalProperties": False}
    members = part.get("allOf", [])
    if not isinstance(members, list):
        return part  # The compiler refuses the invalid `allOf` later.
    named = dict.fromkeys([*(properties or {}), *further], True)
    return {
        **part,
        "allOf": [*as_items(members), {"properties": named, "additionalProperties": False}],
    }


def _without_false(part: Node) -> Node:
    """Returns a schema without `unevaluatedProperties` of false, which closing enforces."""
    if part.get("unevaluatedProperties") is not False:
        return part
    return {name: value for name, value in part.items() if name != "unevaluatedProperties"}


def _texts(value: Any) -> set[str]:
    return {each for each in as_items(value) if isinstance(each, str)}


def _are_resolved(root: Node) -> bool:
    """Returns whether each reference in a schema points to a part of the schema."""
    waiting: list[Any] = [root["schema"]]
    while waiting:
        found = waiting.pop()
        node = as_node(found)
        waiting += as_items(found) if node is None else node.values()
        reference = (node or {}).get("$ref")
        if isinstance(reference, str) and find_place(root, reference) is None:
            return False
    return True
