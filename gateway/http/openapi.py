"""Adds refusals, and headers of requests and answers, to the data plane's OpenAPI document, because
the handlers' signatures do not contain them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from litestar import Router
from litestar.enums import ParamType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.spec import (
    OpenAPIResponse,
    OpenAPIType,
    Parameter,
    Schema,
)
from litestar.routes import HTTPRoute

from gateway.dialects.messages_fields import MessageAnswer
from gateway.dialects.responses_fields import ResponseAnswer
from gateway.http.guards import INFERENCE
from gateway.http.handlers import HotRoute
from gateway.http.request import MAX_BODY_BYTES, MAX_TIMEOUT_S
from web.guards import public
from web.headers import is_of_messages
from web.messages_errors import OVERLOADED, MessagesErrorBody
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


class PublicOperation(PlaneOperation):
    always = ALWAYS


class KeyOperation(PlaneOperation):
    always = ALWAYS | LIMITS


class TokensOperation(PlaneOperation):
    """Operation that returns or counts a conversation's tokens."""

    always = KeyOperation.always | DROPPED


class ServedOperation(PlaneOperation):
    """Operation that runs on a worker and has a deadline."""

    always = KeyOperation.always | SERVED | DROPPED
    more_parameters = (TIMEOUT,)


class GenerationOperation(ServedOperation):
    """Operation that may answer with a stream."""

    other_answers: ClassVar = {"text/event-stream": Schema(type=OpenAPIType.STRING)}


@dataclass
class _OfMessages(PlaneOperation):
    """Operation of Anthropic's Messages API. It describes its errors itself, because the document's
    shared components have OpenAI's error format."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for status, response in (self.responses or {}).items():
            if int(status) >= 400 and isinstance(response, OpenAPIResponse):
                response.headers = {**ALWAYS, **REQUEST_ID, **_headers_of(int(status))}


class CountOperation(_OfMessages, TokensOperation):
    always = TokensOperation.always | REQUEST_ID


class MessagesOperation(_OfMessages, GenerationOperation):
    always = GenerationOperation.always | REQUEST_ID


def describe(route: HTTPRoute, handler: HTTPRouteHandler) -> None:
    """Sets the security, statuses and answers that the handler's guard and signature imply."""
    guards: Any = handler.resolve_guards()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if public in guards:
        handler.operation_class = PublicOperation
        return
    handler.security = [{"key": [INFERENCE]}]
    of_messages, on_worker = is_of_messages(route.path), isinstance(handler, HotRoute)
    statuses = {401, 403, 429, 503}
    if route.path_parameters:
        statuses |= {400, 404}
    if handler.parsed_data_field is not None:
        statuses |= {400, 404, 408, 409, 413}
    answers: dict[int, ResponseSpec] = {}
    if on_worker:
        whole = WHOLE_ANSWERS.get(route.path)
        kind = ServedOperation if whole else GenerationOperation
        handler.operation_class = MessagesOperation if of_messages else kind
        statuses |= {500, 504}
        shape = whole or STREAMED_ANSWERS.get(route.path, Completion)
        answers[200] = ResponseSpec(shape, generate_examples=False, description="The answer.")
    else:
        kind = TokensOperation if route.path == "/tokenize" else KeyOperation
        handler.operation_class = CountOperation if of_messages else kind
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
