"""Converts the data plane's OpenAPI document to the tables of the API reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.dialects import dropped
from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.openai_fields import WITHOUT_EFFECT, Refusal, Wish, marked

Json = Mapping[str, Any]
PREFIX = "#/components/schemas/"
OPENAI = {kind.__name__: kind for kind in (ChatCompletionRequest, CompletionRequest)}
DROPPED_BY_DIALECT: Mapping[str, Mapping[str, str]] = {
    "MessagesRequest": dropped.MESSAGES,
    "CountTokensRequest": dropped.MESSAGES,
    "ResponsesRequest": dropped.RESPONSES,
    "EmbedRequest": dropped.EMBED,
}


class Row(NamedTuple):
    """Row of a table of fields, parameters or headers."""

    name: str
    kind: str
    """Type and limits of the values."""
    note: str
    """`required`, the treatment of a field without effect, or the description of a header."""


class Fields(NamedTuple):
    """Fields of a request's body, or of an object in it."""

    name: str
    fields: list[Row]
    example: Json | None


class Route(NamedTuple):
    method: str
    paths: list[str]
    """Paths of the route, the preferred one first."""
    text: str
    needs_key: bool
    body: Fields | None
    parameters: list[Row]
    """Parameters in the query, the path or a header."""
    headers: list[str]
    statuses: list[int]
    streams: bool


class Reference(NamedTuple):
    routes: list[Route]
    objects: list[Fields]
    """Objects within bodies."""
    headers: list[Row]
    """Headers of answers, including refusals."""


def reference(document: Json) -> Reference:
    """Returns the reference of an OpenAPI `document`, as `/schema` returns it."""
    schemas: Json = document["components"]["schemas"]
    routes: dict[str, Route] = {}
    headers: dict[str, Row] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = _route(method.upper(), path, operation, document, headers)
            # Paths of one handler form one route. Paths with a version and /readyz come first.
            known = routes.get(key := f"{method} {operation['summary']}")
            if known is None:
                routes[key] = route
            else:
                known.paths.append(path)
                known.paths.sort(key=lambda each: (not each.startswith(("/v", "/readyz")), each))
    bodies = [name for route in routes.values() if route.body for name in [route.body.name]]
    objects = [name for name in _reached(bodies, schemas) if name not in bodies]
    found = [_fields(name, schemas) for name in sorted(objects)]
    return Reference(
        list(routes.values()), found, sorted(headers.values(), key=lambda header: header.name)
    )


def _route(
    method: str, path: str, operation: Json, document: Json, headers: dict[str, Row]
) -> Route:
    responses: Json = operation["responses"]
    schemas: Json = document["components"]["schemas"]
    for response in responses.values():
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        for name, header in response.get("headers", {}).items():
            note = header.get("description", "")
            known = headers.get(name)
            if known is None or note:
                headers[name] = Row(name, kind_of(header["schema"]), note)
    answered = responses["200"]
    given = operation.get("requestBody")
    body = None
    if given is not None:
        body = _fields(_name_of(given["content"]["application/json"]["schema"]), schemas)
    return Route(
        method,
        [path],
        " ".join(operation.get("description", "").split()),
        bool(operation.get("security")),
        body,
        [
            Row(each["name"], kind_of(each["schema"]), each.get("description", each["in"]))
            for each in operation.get("parameters", ())
        ],
        sorted(answered.get("headers", ())),
        sorted(map(int, responses)),
        "text/event-stream" in answered.get("content", {}),
    )


def _fields(name: str, schemas: Json) -> Fields:
    schema = schemas[name]
    required = schema.get("required", ())
    rows = [
        Row(field, kind_of(kind), "required" if field in required else _effect(name, field))
        for field, kind in sorted(schema.get("properties", {}).items())
    ]
    rows.sort(key=lambda row: row.note != "required")
    return Fields(name, rows, next(iter(schema.get("examples", ())), None))


def _effect(struct: str, field: str) -> str:
    """Returns a note if an optional field is refused, dropped or ignored, else an empty string."""
    if kind := OPENAI.get(struct):
        if refusal := marked(kind, Refusal).get(field):
            return f"refused{_unless(refusal.nothing)}: {refusal.reason}"
        wish = marked(kind, Wish).get(field)
        if wish is not None:
            return "dropped" + _unless(wish.nothing)
        if field in WITHOUT_EFFECT:
            return "no effect"
    reason = DROPPED_BY_DIALECT.get(struct, {}).get(field)
    return f"dropped: {reason}" if reason else ""


def _unless(values: tuple[Any, ...]) -> str:
    shown = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
    return f", unless {shown}" if shown else ""


def kind_of(schema: Json) -> str:
    """Describes a JSON Schema in a few words. Omits `null`, which always means absent."""
    match schema:
        case {"$ref": reference}:
            return f"`{reference.removeprefix(PREFIX)}`"
        case {"anyOf": kinds}:
            shown = [kind_of(each) for each in kinds if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(shown))
        case {"enum": values}:
            return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
        case {"const": value}:
            return f"`{msgspec.json.encode(value).decode()}`"
        case {"type": "array", **rest}:
            most = f", at most {rest['maxItems']}" if "maxItems" in rest else ""
            return f"list of {kind_of(rest.get('items', {}))}{most}"
        case {"type": "object", "additionalProperties": values, **rest} if values is not False:
            most = f", at most {rest['maxProperties']}" if "maxProperties" in rest else ""
            return f"object of {kind_of(values)}{most}"
        case {"type": "string", **rest} if "maxLength" in rest:
            return f"string of at most {rest['maxLength']} characters"
        case {"type": kind, **rest}:
            return kind + _bounds(rest)
        case _:
            return "any"


def _bounds(schema: Json) -> str:
    bounds: list[str] = []
    for name, word in (
        ("minimum", "from {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "to {}"),
        ("exclusiveMaximum", "below {}"),
    ):
        if name in schema and abs(schema[name]) < 1 << 31:
            bounds.append(word.format(schema[name]))
    return f" {' '.join(bounds)}" if bounds else ""


def _name_of(schema: Json) -> str:
    return schema["$ref"].removeprefix(PREFIX)


def _reached(names: list[str], schemas: Json) -> set[str]:
    """Returns the names of these schemas and of all schemas that they refer to."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _references(schemas[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    text = msgspec.json.encode(schema).decode()
    return (found[1] for found in re.finditer(rf'"{PREFIX}(\w+)"', text))
