"""Adds to the data plane's OpenAPI document what the handlers' signatures do not show: refusals,
and headers of requests and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Router
from litestar.enums import ParamType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.spec import (
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Parameter,
    Schema,
)
from litestar.routes import HTTPRoute

from gateway.dialects.messages_fields import MessageAnswer, MessagesErrorBody
from gateway.dialects.responses_fields import ResponseAnswer
from gateway.http.decoding import MAX_BODY_BYTES
from gateway.http.guards import INFERENCE
from gateway.http.handlers import HotRoute
from gateway.http.request import MAX_TIMEOUT_S
from web.guards import public
from web.headers import is_of_messages
from web.messages_errors import OVERLOADED
from web.openapi import Headers, PlaneOperation, header, plane_document, refused

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
ALWAYS = {
    "x-request-id": header(
        {"type": "string", "pattern": "^req_"}, description="Id of the request, for the operator."
    ),
    "openai-processing-ms": header(
        {"type": "integer", "minimum": 0}, description="Milliseconds until the answer began."
    ),
}
LIMITS = {
    f"x-ratelimit-{what}-{unit}": header(
        {"type": "string" if what == "reset" else "integer"},
        required=False,
        description="Present if the tenant or the key has such a limit.",
    )
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
REQUEST_ID = {
    "request-id": header(
        {"type": "string", "pattern": "^req_"},
        description="The id of `x-request-id`, for Anthropic's clients.",
    )
}
"""Header that Anthropic's clients read."""
DROPPED = {
    "loraplex-dropped": header(
        {"type": "string"},
        required=False,
        description="Names of fields that had no effect, if there are any.",
    )
}
SERVED = {
    "loraplex-worker": header({"type": "string"}, description="Id of the worker."),
    "loraplex-adapter-version": header(
        {"type": "integer", "minimum": 1},
        required=False,
        description="Present if the model is an adapter.",
    ),
}
AFTER = {
    f"retry-after{suffix}": header(
        {"type": "integer", "minimum": 1},
        required=False,
        description=f"{unit} after which to repeat the request.",
    )
    for suffix, unit in (("", "Seconds"), ("-ms", "Milliseconds"))
}
FINAL = header(
    {"const": "false"}, required=False, description="Present if repeating the request is of no use."
)
TIMEOUT = Parameter(
    "x-request-timeout",
    ParamType.HEADER,
    schema=Schema(type=OpenAPIType.NUMBER, exclusive_minimum=0, maximum=MAX_TIMEOUT_S),
    description="Seconds within which the first token is useful. Default: 600.",
)


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


def _operation(
    headers: Headers, *, has_timeout: bool = False, may_stream: bool = False
) -> type[PlaneOperation]:
    """Returns the class of operations whose answers have these headers. `has_timeout` adds the
    header of requests that sets a deadline, and `may_stream` the stream as a form of the answer."""

    @dataclass
    class GatewayOperation(PlaneOperation):
        always = headers

        def __post_init__(self) -> None:
            super().__post_init__()
            if has_timeout:
                self.parameters = [*(self.parameters or ()), TIMEOUT]
            for status, response in (self.responses or {}).items():
                if not isinstance(response, OpenAPIResponse):
                    continue
                if status == "200" and may_stream and response.content is not None:
                    stream = OpenAPIMediaType(Schema(type=OpenAPIType.STRING))
                    response.content["text/event-stream"] = stream
                elif int(status) >= 400 and REQUEST_ID.keys() <= headers.keys():
                    # An error in Anthropic's form, which the document's components do not have.
                    response.headers = {**ALWAYS, **REQUEST_ID, **_headers_of(int(status))}

    return GatewayOperation


PublicOperation = _operation(ALWAYS)


def describe(route: HTTPRoute, handler: HTTPRouteHandler) -> None:
    """Sets the security, statuses and answers that the handler's guard and signature imply."""
    guards: Any = handler.resolve_guards()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if public in guards:
        handler.operation_class = PublicOperation
        return
    handler.security = [{"key": [INFERENCE]}]
    of_messages, on_worker = is_of_messages(route.path), isinstance(handler, HotRoute)
    whole = WHOLE_ANSWERS.get(route.path)
    headers = ALWAYS | LIMITS
    statuses = {401, 403, 429, 503}
    if route.path_parameters:
        statuses |= {400, 404}
    if handler.parsed_data_field is not None:
        statuses |= {400, 404, 408, 409, 413}
    answers: dict[int, ResponseSpec] = {}
    if on_worker:
        headers |= SERVED
        statuses |= {500, 504}
        shape = whole or STREAMED_ANSWERS.get(route.path, Completion)
        answers[200] = ResponseSpec(shape, generate_examples=False, description="The answer.")
    if on_worker or of_messages or route.path == "/tokenize":
        headers |= DROPPED
    if of_messages:
        headers |= REQUEST_ID
    handler.operation_class = _operation(
        headers, has_timeout=on_worker, may_stream=on_worker and whole is None
    )
    refusals = _messages_refusals(statuses) if of_messages else refused(*statuses)
    handler.responses = answers | refusals


def _messages_refusals(statuses: set[int]) -> dict[int, ResponseSpec]:
    return {
        OVERLOADED if status == 503 else status: ResponseSpec(
            MessagesErrorBody, generate_examples=False, description=REFUSALS[status]
        )
        for status in sorted(statuses)
    }


def document() -> OpenAPIConfig:
    """Returns the configuration of the OpenAPI document, which is public at /schema."""
    router = Router("/schema", route_handlers=[], guards=[public], include_in_schema=False)
    return plane_document(REFUSALS, _headers_of, router, title="loraplex", version="1")


def _headers_of(status: int) -> Headers:
    """Returns the headers of an error answer."""
    headers = dict(ALWAYS)
    if status == 401:
        headers["www-authenticate"] = header({"const": "Bearer"}, description="With status 401.")
    if status in (429, 503, OVERLOADED):
        headers |= AFTER
    if status in (409, 429, 500, 504):
        headers["x-should-retry"] = FINAL
    return headers
