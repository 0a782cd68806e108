"""Writes the OpenAPI document of the data plane."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

import msgspec

from gateway.dialects.messages_fields import MessageAnswer
from gateway.dialects.responses_fields import ResponseAnswer
from gateway.http.request import MAX_BODY_BYTES, MAX_TIMEOUT_S
from gateway.http.routing import Route
from web.messages_errors import OVERLOADED, MessagesErrorBody
from web.openapi import ErrorBody, schemas_of
from web.request_head import is_of_messages

Json = dict[str, Any]

REFUSALS = {
    400: "The request is invalid or not supported; `param` names the field.",
    401: "The API key is missing or invalid.",
    403: "The key lacks the scope, or may not be used from this address.",
    404: "The tenant has no such model, or the key may not use it.",
    408: "The rest of the request did not arrive, or arrived too slowly.",
    409: "The adapter's chat template is not approved.",
    413: f"The body has more than {MAX_BODY_BYTES} bytes.",
    429: "A limit of the tenant or the key is reached; `retry-after` says when to retry.",
    500: "The worker failed, or workers crashed while they ran this request.",
    503: "The server is overloaded, or no worker can serve the request now.",
    504: "No answer began within `x-request-timeout`.",
}


def _header(description: str, *, required: bool = True, **schema: Any) -> Json:
    """Returns the description of a header. `schema` is its JSON Schema."""
    return {"description": description, "required": required, "deprecated": False, "schema": schema}


_if_present = partial(_header, required=False)
ALWAYS = {
    "x-request-id": _header("Id of the request, for the operator.", type="string", pattern="^req_"),
    "openai-processing-ms": _header(
        "Milliseconds until the answer began.", type="integer", minimum=0
    ),
}
LIMITS = {
    f"x-ratelimit-{what}-{unit}": _if_present(
        "Present if the tenant or the key has such a limit.",
        type="string" if what == "reset" else "integer",
    )
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
REQUEST_ID = {
    "request-id": _header(
        "The id of `x-request-id`, for Anthropic's clients.", type="string", pattern="^req_"
    )
}
DROPPED = {
    "loraplex-dropped": _if_present(
        "Names of fields that had no effect, if there are any.", type="string"
    )
}
SERVED = {
    "loraplex-worker": _header("Id of the worker.", type="string"),
    "loraplex-adapter-version": _if_present(
        "Present if the model is an adapter.", type="integer", minimum=1
    ),
}
AFTER = {
    f"retry-after{suffix}": _if_present(
        f"{unit} after which to repeat the request.", type="integer", minimum=1
    )
    for suffix, unit in (("", "Seconds"), ("-ms", "Milliseconds"))
}
FINAL = _if_present("Present if repeating the request is of no use.", const="false")
TIMEOUT = {"name": "x-request-timeout", "in": "header"} | _if_present(
    "Seconds within which the first token is useful. Default: 600.",
    type="number",
    exclusiveMinimum=0,
    maximum=MAX_TIMEOUT_S,
)
PUBLIC_REFUSALS = {"/version": (429, 503)}
"""Statuses of refusals by public routes, by path."""
NOT_READY = dict.fromkeys(("/readyz", "/health"), "Not ready; `reason` says why.")
"""Descriptions of answers with status 503 that are no errors, by path."""


class Completion(msgspec.Struct, frozen=True):
    """Answer of a completion route, with OpenAI's fields."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class EmbeddingList(msgspec.Struct, frozen=True):
    """Answer of the embeddings route, with OpenAI's fields."""

    object: str
    data: list[dict[str, Any]]
    model: str
    usage: dict[str, Any]


class TypedEmbeddings(msgspec.Struct, frozen=True):
    """Answer of the embed route, with Cohere's fields."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


class ScoreList(msgspec.Struct, frozen=True):
    """Answer of the score route, with vLLM's fields."""

    id: str
    object: str
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: dict[str, Any]


class Ranking(msgspec.Struct, frozen=True):
    """Answer of the rerank route, with Jina's and vLLM's fields."""

    id: str
    model: str
    usage: dict[str, Any]
    results: list[dict[str, Any]]


WHOLE_ANSWERS: dict[str, type[msgspec.Struct]] = {
    "/v1/embeddings": EmbeddingList,
    "/v2/embed": TypedEmbeddings,
    **dict.fromkeys(("/v1/score", "/score"), ScoreList),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), Ranking),
}
"""Bodies of the answers of routes that never stream, by path."""
STREAMED_ANSWERS: dict[str, type[msgspec.Struct]] = {
    "/v1/messages": MessageAnswer,
    "/v1/responses": ResponseAnswer,
}
"""Bodies of the answers of routes that may stream, by path. Others use `Completion`."""


def document(routes: Sequence[Route]) -> Json:
    """Returns the OpenAPI document of these routes."""
    schemas: dict[str, Json] = {}
    paths = {
        path: {route.method.lower(): _operation(route, path, schemas)}
        for route in routes
        if route.in_document
        for path in route.paths
    }
    refusals = {
        str(status): _answer(text, ErrorBody, _headers_of(status), schemas)
        for status, text in REFUSALS.items()
    }
    key = {"type": "http", "scheme": "bearer", "bearerFormat": "lpx_..."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "loraplex", "version": "1"},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": refusals,
            "securitySchemes": {"key": key},
        },
    }


def _operation(route: Route, path: str, schemas: dict[str, Json]) -> Json:
    """Returns the description of a route at one of its paths. Adds schemas that it refers to."""
    function, of_messages = route.function, is_of_messages(path)
    name = _camel(function.__name__)
    parameters = list(_parameters(route, path))
    refusals: dict[str, Json] = {}
    for status in _refusals(route, path):
        if of_messages:
            sent = OVERLOADED if status == 503 else status
            headers = REQUEST_ID | _headers_of(sent)
            text = REFUSALS[status]
            refusals[str(sent)] = _answer(text, MessagesErrorBody, headers, schemas)
        else:
            refusals[str(status)] = {"$ref": f"#/components/responses/{status}"}
    found: Json = {
        "summary": name,
        "operationId": _camel(path.partition("{")[0]) + name,
        "description": inspect.getdoc(function),
        "deprecated": False,
        "responses": _answers(route, path, schemas) | refusals,
    }
    if route.needs is not None:
        found["security"] = [{"key": [route.needs]}]
    if parameters:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": _content(route.body, schemas)}
    return found


def _parameters(route: Route, path: str) -> Iterator[Json]:
    if "{" in path:
        name = path.partition("{")[2].rstrip("}")
        schema = {"type": "string"}
        yield {"name": name, "in": "path", "schema": schema, "required": True, "deprecated": False}
    if route.on_worker:
        yield TIMEOUT


def _refusals(route: Route, path: str) -> Iterator[int]:
    """Yields the statuses with which a route refuses requests."""
    if route.needs is None:
        yield from PUBLIC_REFUSALS.get(path, ())
        return
    yield from (401, 403, 429, 503)
    if "{" in path:
        yield from (400, 404)
    if route.body is not None:
        yield from (400, 404, 408, 409, 413)
    if route.on_worker:
        yield from (500, 504)


def _answers(route: Route, path: str, schemas: dict[str, Json]) -> dict[str, Json]:
    """Returns the answers of a route that are no errors, by status."""
    headers = dict(ALWAYS)
    if route.needs is not None:
        headers |= LIMITS
    if is_of_messages(path):
        headers |= REQUEST_ID
    if not route.on_worker:
        (kind,) = get_args(route.answer)
        if path == "/tokenize" or is_of_messages(path):
            headers |= DROPPED
        found = {"200": _answer("Request fulfilled, document follows", kind, headers, schemas)}
        if path in NOT_READY:
            found["503"] = _answer(NOT_READY[path], kind, headers, schemas)
        return found
    whole = WHOLE_ANSWERS.get(path)
    kind = whole or STREAMED_ANSWERS.get(path, Completion)
    answer = _answer("The answer.", kind, headers | SERVED | DROPPED, schemas)
    if whole is None:
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"200": answer}


def _answer(text: str, kind: Any, headers: Json, schemas: dict[str, Json]) -> Json:
    return {"description": text, "headers": headers, "content": _content(kind, schemas)}


def _content(kind: Any, schemas: dict[str, Json]) -> Json:
    """Returns the description of a JSON body. Adds schemas that it refers to."""
    schema, named = schemas_of(kind)
    for name, written in named.items():
        assert schemas.setdefault(name, written) == written, f"two types are named {name}"
    return {"application/json": {"schema": schema}}


def _camel(text: str) -> str:
    return "".join(word.capitalize() for word in re.split(r"\W|_", text))


def _headers_of(status: int) -> Json:
    """Returns the headers of an error answer."""
    headers = dict(ALWAYS)
    if status == 401:
        headers["www-authenticate"] = _header("With status 401.", const="Bearer")
    if status in (429, 503, OVERLOADED):
        headers |= AFTER
    if status in (409, 429, 500, 504):
        headers["x-should-retry"] = FINAL
    return headers
