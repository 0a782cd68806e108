"""The OpenAPI document of the admin plane: routes from the framework, bodies from the structs that
decode and encode them, statuses by what a route takes. What none of these tell is in OPERATIONS.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from litestar import Litestar, Response
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute
from litestar.typing import FieldDefinition

from admin.adapters.schemas import AliasSet, VersionView
from admin.http.controllers.organization import COMPLETIONS, COSTS, SINGLE, Parameters
from admin.http.controllers.prices import PriceSet
from admin.http.controllers.usage import UsagePage
from admin.http.parameters import parameters
from admin.http.problems import HEADERS, ErrorBody
from admin.keys.schemas import KeyCreate, KeyRotate
from admin.models.schemas import ModelChange, ModelRegister
from admin.quotas.schemas import KeyLimits, TenantLimits
from admin.schemas import Deleted, Page
from admin.tenants.schemas import TenantChange, TenantCreate
from admin.uploads.schemas import UploadCreate, VersionCreate

JSON = "application/json"
BINARY = {"schema": {"type": "string", "format": "binary"}}
CONSTRAINTS = {
    "ge": "minimum",
    "le": "maximum",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}
DESCRIPTIONS = {
    "after": "Where the page before ended.",
    "limit": "Of what a page holds.",
    "tenant": "Whose, by id or name; an admin key must say, a tenant's may only name its own.",
}
ERRORS = {
    400: "The request breaks a rule; `param` names what.",
    401: "No API key, or none that is valid.",
    403: "The key may not do this, or not from this address.",
    404: "No such thing, or not for this caller.",
    408: "The rest of the request did not come.",
    409: "The present state forbids it.",
    412: "It has another ETag by now.",
    413: "More bytes than allowed.",
    422: "The Idempotency-Key came before with another request.",
    429: "The tenant has as many uploads under way as it may.",
    503: "The database or the store does not answer, or too many uploads are under way.",
    507: "The server's disk is full.",
}
UPLOADING = (404, 408, 409, 413, 507)


class Operation(msgspec.Struct, frozen=True):
    """What is added to an operation, or stands for what its handler's signature would say."""

    statuses: tuple[int, ...] = ()
    """Of refusals beside those that follow from the signature."""
    parameters: tuple[dict[str, Any], ...] = ()
    body: Mapping[str, Any] | None = None
    """By media type."""
    answers: Mapping[int, Any] | None = None
    """Types of the body by status."""
    also: Mapping[str, Any] = {}
    """Other media types of the answer."""


def _query(asked: Parameters) -> tuple[dict[str, Any], ...]:
    """Of the reports in OpenAI's shape."""
    number = {"type": "integer", "minimum": 0, "maximum": 99_999_999_999}
    kinds: dict[str, Any] = {
        "start_time": number,
        "end_time": number,
        "page": number,
        "bucket_width": {"enum": list(asked.widths)},
        "limit": {"type": "integer", "minimum": 1, "maximum": asked.widths["1d"].most},
        "group_by": {"type": "array", "items": {"enum": list(asked.dimensions)}},
    }
    text = {"type": "array", "items": {"type": "string"}}
    names = (*SINGLE, *asked.lists)
    return tuple(
        {
            "name": name,
            "in": "query",
            "required": name == "start_time",
            "schema": kinds.get(name, text),
        }
        for name in names
    )


FORM = {
    "schema": {
        "type": "object",
        "required": ["name"],
        "properties": {
            name: {"type": "string"}
            for name in (
                "name",
                "model",
                "tenant",
                "alias",
                "sha256",
                "serving",
                "approve_template",
            )
        }
        | {
            name: {"type": "string", "format": "binary"}
            for name in ("adapter_config.json", "adapter_model.safetensors", "file")
        },
    }
}
OFFSET = {
    "name": "upload-offset",
    "in": "header",
    "required": True,
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
}
OPERATIONS = {
    "create_version": Operation(
        statuses=(*UPLOADING, 429),
        body={"multipart/form-data": FORM, JSON: VersionCreate},
        answers={201: VersionView, 200: VersionView},
    ),
    "create_upload": Operation(statuses=(507,)),
    "append": Operation(
        statuses=UPLOADING,
        parameters=(OFFSET,),
        body={"application/octet-stream": BINARY},
    ),
    "show_usage": Operation(
        answers={200: UsagePage}, also={"text/csv": {"schema": {"type": "string"}}}
    ),
    "show_completions": Operation(parameters=_query(COMPLETIONS)),
    "show_costs": Operation(parameters=_query(COSTS)),
    "show_schema": Operation(answers={200: dict[str, Any]}),
}
EXAMPLES: dict[Any, Any] = {
    TenantCreate: {"name": "acme", "sharing_group": "family"},
    TenantChange: {"sharing_group": "family"},
    KeyCreate: {"name": "ci", "scopes": ["inference"], "models": ["bot@staging"]},
    KeyRotate: {"overlap_s": 3600},
    ModelRegister: {"name": "llama", "digest": "b" * 64, "max_model_len": 8192},
    ModelChange: {"max_model_len": 4096},
    TenantLimits: {"tokens_per_day": 2_000_000, "spend_per_month": "250.00", "adapters": 20},
    KeyLimits: {"requests_per_minute": 60, "spend_per_day": "5.00"},
    PriceSet: {"input": "0.20", "cached_input": "0.05", "output": "0.60"},
    AliasSet: {"canary": {"7": 90, "8": 10}},
    UploadCreate: {"bytes": 1048576, "filename": "bot.tar"},
    VersionCreate: {"upload": "upl_000000000000000000000000", "name": "bot", "alias": "prod"},
}


@lru_cache(maxsize=1)
def make_document(app: Litestar) -> dict[str, Any]:
    """OpenAPI 3.1, of every route of the app. Made when it is first asked for: it takes a tenth of
    a second."""
    operations = list(_operations(app))
    components = _Components()
    paths: dict[str, Any] = {}
    for route, handler, method in operations:
        shown = paths.setdefault(route.path_format, {})
        shown[method.lower()] = _describe(route, handler, components)
    try:
        release = version("loraplex")
    except PackageNotFoundError:
        release = "not installed"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "loraplex admin",
            "version": release,
            "description": f"A body has at most {app.request_max_body_size} bytes, an upload as"
            " many as the server is told. Fields and parameters that are not here are refused by"
            " name.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "responses": _refusals(components),
            "schemas": components.schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "bearerFormat": "lpx_..."}
            },
        },
    }


class _Components:
    """Gives each type that has a name its place in the document."""

    def __init__(self) -> None:
        self.schemas: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, or a reference to it."""
        (schema,), named = msgspec.json.schema_components(
            [kind], ref_template="#/components/schemas/{name}"
        )
        for name, each in _portable(named).items():
            known = self.schemas.setdefault(name, each)
            assert known == each, f"two types are named {name}"
        return _portable(schema)


def _operations(app: Litestar) -> Iterator[tuple[HTTPRoute, HTTPRouteHandler, str]]:
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                for method in sorted(handler.http_methods - {"OPTIONS"}):
                    yield route, handler, method


def _describe(
    route: HTTPRoute, handler: HTTPRouteHandler, components: _Components
) -> dict[str, Any]:
    name = handler.handler_name
    more = OPERATIONS.get(name, Operation())
    taken = parameters(handler)
    text = " ".join((handler.fn.__doc__ or "").split())
    guards: Any = handler.resolve_guards()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    scopes = [scope for guard in guards for scope in guard.__dict__["scopes"]]
    shown: dict[str, Any] = {
        "operationId": _operation_id(handler),
        "summary": re.split(r"(?<=[.:])\s", text, maxsplit=1)[0] or name.replace("_", " "),
        "description": text,
        "tags": [route.path_format.split("/")[3 if name != "show_costs" else 2]],
        "security": [{"key": [scope]} for scope in scopes],
        "parameters": [
            *(_parameter(*each, components) for each in taken),
            *more.parameters,
        ],
        "responses": _answers(route, handler, more, components)
        | {
            str(status): {"$ref": f"#/components/responses/{status}"}
            for status in sorted(_statuses(handler, more))
        },
    }
    body = _body(handler, more, components)
    if body is not None:
        shown["requestBody"] = {"required": True, "content": body}
    return shown


def _operation_id(handler: HTTPRouteHandler) -> str:
    """Methods of two controllers may have one name."""
    return handler.fn.__qualname__.replace("Controller.", ".")


def _parameter(
    name: str, place: str, field: FieldDefinition, components: _Components
) -> dict[str, Any]:
    schema = dict(components.of(field.annotation))
    kwarg: Any = field.kwarg_definition
    limits = {
        word: getattr(kwarg, ours)
        for ours, word in CONSTRAINTS.items()
        if getattr(kwarg, ours) is not None
    }
    if "anyOf" in schema:  # a parameter is absent, never null
        (schema,) = [each for each in schema["anyOf"] if each != {"type": "null"}]
    if place == "path" and schema == {"type": "string"}:
        limits.setdefault("minLength", 1)
    shown: dict[str, Any] = {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": _portable(schema | limits),
    }
    if not field.is_required and field.default not in (None, ""):
        shown["schema"]["default"] = field.default
    description = kwarg.description or DESCRIPTIONS.get(name)
    return shown | ({"description": description} if description else {})


def _body(
    handler: HTTPRouteHandler, more: Operation, components: _Components
) -> dict[str, Any] | None:
    if more.body is not None:
        kinds = more.body
    elif handler.parsed_data_field is not None:
        kinds = {JSON: handler.parsed_data_field.annotation}
    else:
        return None
    return {
        media_type: kind if isinstance(kind, dict) else _content(kind, components)
        for media_type, kind in kinds.items()
    }


def _content(kind: Any, components: _Components) -> dict[str, Any]:
    example = {"example": EXAMPLES[kind]} if kind in EXAMPLES else {}
    return {"schema": components.of(kind)} | example


def _answers(
    route: HTTPRoute, handler: HTTPRouteHandler, more: Operation, components: _Components
) -> dict[str, Any]:
    kinds = more.answers or {handler.status_code: _answered(handler)}
    names = ["x-request-id"]
    if _has_etag(route, handler):
        names.append("etag")
    if any(name == "Idempotency-Key" for name, _, _ in parameters(handler)):
        names.append("idempotent-replayed")
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "headers": {name: _HEADERS[name] for name in names},
            "content": {JSON: _content(kind, components), **more.also},
        }
        for status, kind in kinds.items()
    }


_HEADERS = {
    "x-request-id": {"required": True, "schema": {"type": "string", "pattern": "^req_"}},
    "etag": {"required": True, "schema": {"type": "string", "pattern": '^"'}},
    "idempotent-replayed": {
        "description": "There if this was done before.",
        "schema": {"const": "true"},
    },
    "allow": {"required": True, "schema": {"type": "string"}},
}


def _answered(handler: HTTPRouteHandler) -> Any:
    """The type of the body of an answer."""
    kind = handler.parsed_return_field.annotation
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Response else kind


def _has_etag(route: HTTPRoute, handler: HTTPRouteHandler) -> bool:
    """What can be changed on a condition shows what the condition is about."""
    is_conditional = any(
        name == "If-Match" for each in route.route_handlers for name, _, _ in parameters(each)
    )
    kind = _answered(handler)
    takes_header = any(name == "Idempotency-Key" for name, _, _ in parameters(handler))
    return is_conditional and kind is not Deleted and not takes_header and not _is_page(kind)


def _is_page(kind: Any) -> bool:
    return typing.get_origin(kind) is Page


def _statuses(handler: HTTPRouteHandler, more: Operation) -> set[int]:
    """Of refusals."""
    names = {name for name, _, _ in parameters(handler)}
    places = {place for _, place, _ in parameters(handler)}
    found = {400, 401, 403, 503} | set(more.statuses)
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


def _refusals(components: _Components) -> dict[str, Any]:
    return {
        str(status): {
            "description": text,
            "headers": {"x-request-id": _HEADERS["x-request-id"]}
            | {
                name: {"required": True, "schema": {"const": value}}
                for name, value in HEADERS.get(status, {}).items()
            },
            "content": {JSON: {"schema": components.of(ErrorBody)}},
        }
        for status, text in ERRORS.items()
    }


def _portable(schema: Any) -> Any:
    r"""JSON Schema's patterns are ECMAScript's, where `$` is what `\Z` is here."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\Z", "$") if name == "pattern" else _portable(value)
            for name, value in typing.cast("dict[str, Any]", schema).items()
        }
    if isinstance(schema, list):
        return [_portable(each) for each in typing.cast("list[Any]", schema)]
    return schema
