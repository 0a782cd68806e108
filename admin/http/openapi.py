"""Parts of the admin plane's OpenAPI document that the handlers' signatures do not contain: scopes,
error answers, and headers of answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Any

from litestar import Request, Router
from litestar.datastructures import ResponseHeader
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import OpenAPIType, Operation, Parameter, Schema
from litestar.routes import HTTPRoute

from admin.http.guards import ADMIN, requires
from admin.http.parameters import check_parameters, parameters
from admin.http.preconditions import Tagged
from web.openapi import Headers, PlaneOperation, header, plane_document, refused
from web.version import this_version

REFUSALS = {
    400: "The request breaks a rule; `param` names what.",
    401: "No API key, or none that is valid.",
    403: "The key may not do this, or not from this address.",
    404: "No such thing, or not for this caller.",
    408: "The rest of the request did not come.",
    409: "The present state forbids it.",
    412: "It has another ETag by now.",
    413: "More bytes than allowed.",
    422: "The Idempotency-Key came before with another request.",
    429: "The tenant has used up its rate of calls, or has as many uploads open as it may.",
    503: "The database or the store does not answer, or too many uploads are under way.",
    507: "The server's disk is full.",
}
_FINAL = {"x-should-retry": "false"}
_SOON = {"retry-after": "1", "retry-after-ms": "1000"}
FIXED_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    409: _FINAL,
    412: _FINAL,
    422: _FINAL,
    429: _SOON,
    503: _SOON,
}
ALWAYS = {"x-request-id": header({"type": "string", "pattern": "^req_"})}
ETAG = ResponseHeader("etag", documentation_only=True, value="", required=True)
REPLAYED = ResponseHeader(
    "idempotent-replayed",
    documentation_only=True,
    value="true",
    description="There if this was done before.",
)


@dataclass
class AdminOperation(PlaneOperation):
    """Operation whose optional parameters may be absent but not null."""

    always = ALWAYS

    def __post_init__(self) -> None:
        for parameter in self.parameters or ():
            if isinstance(parameter, Parameter) and isinstance(parameter.schema, Schema):
                _leave_out_null(parameter.schema)
        super().__post_init__()


def _leave_out_null(schema: Schema) -> None:
    if schema.enum:
        schema.enum = [value for value in schema.enum if value is not None]
        schema.type = OpenAPIType.STRING
    for kind in schema.one_of or ():
        if isinstance(kind, Schema) and kind.type != OpenAPIType.NULL:
            schema.one_of = None
            for field in fields(Schema):
                if getattr(schema, field.name) is None:
                    setattr(schema, field.name, getattr(kind, field.name))


def describe(_route: HTTPRoute, handler: HTTPRouteHandler) -> None:
    """Adds to a handler the description of its security, error answers and headers, which follow
    from its guards and signature."""
    guards: Any = handler.resolve_guards()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    scopes = [scope for guard in guards for scope in guard.__dict__["scopes"]]
    names = {name for name, _, _ in parameters(handler)}
    handler.security = [{"key": [scope]} for scope in scopes]
    handler.summary = handler.handler_name.replace("_", " ").capitalize()
    statuses = _statuses(handler)
    if any(scope is not ADMIN for scope in scopes):
        statuses.add(429)
    handler.responses = refused(*statuses) | dict(handler.responses or {})
    if handler.operation_class is Operation:
        handler.operation_class = AdminOperation
    headers = list(handler.response_headers or ())
    if "Idempotency-Key" in names:
        headers.append(REPLAYED)
    if handler.parsed_return_field.is_subclass_of(Tagged):
        headers.append(ETAG)
    handler.response_headers = headers


def _statuses(handler: HTTPRouteHandler) -> set[int]:
    """Returns the error statuses that a handler may answer with."""
    names = {name for name, _, _ in parameters(handler)}
    places = {place for _, place, _ in parameters(handler)}
    found = {400, 401, 403, 503}
    if "path" in places or "tenant" in names:
        found.add(404)
    if not handler.http_methods & {"GET"}:
        found.add(409)
    if handler.parsed_data_field is not None:
        found.add(413)
    if "If-Match" in names:
        found.add(412)
    if "Idempotency-Key" in names:
        found.add(422)
    return found


async def _prepare(request: Request[Any, Any, Any]) -> None:
    """Checks the parameters, and generates the document in a thread the first time, because
    generation takes 0.1 s."""
    await check_parameters(request)
    await asyncio.to_thread(getattr, request.app, "openapi_schema")


def document(max_body_bytes: int) -> OpenAPIConfig:
    """Returns the configuration of the document, which admins can read at /admin/v1/schema."""
    router = Router(
        "/admin/v1/schema",
        route_handlers=[],
        guards=[requires(ADMIN)],
        before_request=_prepare,
        include_in_schema=False,
    )
    return plane_document(
        REFUSALS,
        _headers_of,
        router,
        title="loraplex admin",
        version=this_version(),
        description=f"A body has at most {max_body_bytes} bytes, an upload as many as the server is"
        " told. Fields and parameters that are not here are refused by name.",
        operation_id_creator=_operation_id,
    )


def _headers_of(status: int) -> Headers:
    """Returns the headers of an error answer."""
    fixed = FIXED_HEADERS.get(status, {})
    return ALWAYS | {name: header({"const": value}) for name, value in fixed.items()}


def _operation_id(handler: HTTPRouteHandler, *_: Any) -> str:
    """Returns an operation id with the controller's name, because method names are not unique."""
    return handler.fn.__qualname__.replace("Controller.", ".")
