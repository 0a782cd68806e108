"""Helpers for the OpenAPI documents of both planes: schemas of structs, and the error format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import msgspec
from litestar import MediaType, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)
from litestar.params import BodyKwarg
from litestar.plugins import OpenAPISchemaPlugin, ReceiveRoutePlugin
from litestar.routes import BaseRoute, HTTPRoute
from litestar.typing import FieldDefinition

REFERENCE = "#/components/schemas/{name}"
Headers = dict[str, OpenAPIHeader]


class ErrorDetails(msgspec.Struct, frozen=True):
    """Error. Some codes have further fields: a refused adapter has field, got, allowed and hint."""

    message: str
    type: str
    param: str | None
    """Field, parameter or header that is wrong."""
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every error, in OpenAI's form."""

    error: ErrorDetails


ERROR = Reference(REFERENCE.format(name=ErrorBody.__name__))


class StructSchemas(OpenAPISchemaPlugin):
    """Plugin that describes structs as msgspec decodes and encodes them.

    The framework's own schemas omit nested bounds, and the fact that unknown fields are refused. A
    struct's class variable `example` becomes the schema's example.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return not field_definition.is_union and field_definition.is_subclass_of(msgspec.Struct)

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Any:
        """Returns a reference to the struct's schema. Adds it and all schemas that it refers to."""
        own, named = schemas_of(field_definition.annotation)
        own_name = own["$ref"].rpartition("/")[2]
        for name, written in named.items():
            known = self._known.setdefault(name, written)
            assert known == written, f"two types are named {name}"
            fill(
                schema_creator.schema_registry.get_schema_for_field_definition(_key(name)), written
            )
        return schema_creator.schema_registry.get_reference_for_field_definition(_key(own_name))


class Requirements(ReceiveRoutePlugin):
    """Plugin that calls `describe` for each handler in the document. `describe` sets the handler's
    OpenAPI properties that follow from the handler's guards and signature."""

    def __init__(self, describe: Callable[[HTTPRoute, HTTPRouteHandler], None]) -> None:
        self._describe = describe

    def receive_route(self, route: BaseRoute) -> None:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                if handler.resolve_include_in_schema():
                    self._describe(route, handler)


@cache
def schemas_of(kind: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns a type's schema, which is a reference if it is a struct, and all schemas that it
    refers to, by name. They do not show that a field is null by default. Cached, because the struct
    of error bodies is needed for each route."""
    (own,), components = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    # Defaults may be tuples or structs, which become JSON values when they are encoded.
    named = msgspec.json.decode(msgspec.json.encode(components))
    for written in named.values():
        for field in written.get("properties", {}).values():
            if field.get("default", field) is None:
                del field["default"]
    if "example" in getattr(kind, "__dict__", ()):
        named[own["$ref"].rpartition("/")[2]]["examples"] = [kind.__dict__["example"]]
    return own, named


def _key(name: str) -> FieldDefinition:
    """Returns a key for a named schema in the framework's registry."""
    kwarg = BodyKwarg(schema_component_key=name)
    return FieldDefinition.from_kwarg(annotation=dict, name=name, kwarg_definition=kwarg)


def fill(schema: Schema, written: Mapping[str, Any]) -> Schema:
    """Copies the JSON Schema `written` to the schema, and returns it."""
    for name, value in written.items():
        setattr(schema, re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name), value)
    return schema


def flat(kind: type[msgspec.Struct]) -> Schema:
    """Returns a struct's schema without references, for places where the framework creates none."""
    (own,), named = msgspec.json.schema_components([kind])
    example = vars(kind).get("example")
    return fill(Schema(examples=example and [example]), named[own["$ref"].rpartition("/")[2]])


def refused(*statuses: int) -> dict[int, ResponseSpec]:
    """Returns the possible error statuses of a handler, for its argument `responses`."""
    return {status: ResponseSpec(ErrorBody, generate_examples=False) for status in sorted(statuses)}


def plane_document(
    refusals: Mapping[int, str],
    headers_of: Callable[[int], Headers],
    router: Router,
    **options: Any,
) -> OpenAPIConfig:
    """Returns the configuration of a plane's OpenAPI document. `router` serves the document.

    `refusals` are the descriptions of the plane's error answers by status, and `headers_of` returns
    the headers of such an answer. `options` are further arguments of the configuration.
    """
    content = {"application/json": OpenAPIMediaType(ERROR)}
    responses = {
        str(status): OpenAPIResponse(text, headers={**headers_of(status)}, content={**content})
        for status, text in refusals.items()
    }
    key = SecurityScheme(type="http", scheme="bearer", bearer_format="lpx_...")
    return OpenAPIConfig(
        components=Components(responses={**responses}, security_schemes={"key": key}),
        use_handler_docstrings=True,
        # Other renderers would load scripts from other servers.
        render_plugins=[JsonRenderPlugin(media_type=MediaType.JSON)],
        openapi_router=router,
        **options,
    )


def header(
    written: Mapping[str, Any], *, required: bool = True, description: str | None = None
) -> OpenAPIHeader:
    """Returns the description of a header. `written` is the header's JSON Schema."""
    return OpenAPIHeader(fill(Schema(), written), required=required, description=description)


@dataclass
class PlaneOperation(Operation):
    """Operation that refers to the error answers in the document's components. Subclasses add what
    the handler's signature does not show."""

    always: ClassVar[Headers] = {}
    """Headers of every answer that is not an error."""
    more_parameters: ClassVar[Sequence[Parameter]] = ()
    body: ClassVar[RequestBody | None] = None
    other_answers: ClassVar[Mapping[str, Schema]] = {}
    """Schemas of answers with status 200 that are not JSON, by media type."""

    def __post_init__(self) -> None:
        self.parameters = [*(self.parameters or ()), *self.more_parameters] or None
        self.request_body = self.body or self.request_body
        responses = self.responses or {}
        for status, response in responses.items():
            assert isinstance(response, OpenAPIResponse)
            if ERROR in [content.schema for content in (response.content or {}).values()]:
                responses[status] = Reference(f"#/components/responses/{status}")
            else:
                response.headers = {**(response.headers or {}), **self.always}
            if status == "200" and response.content is not None:
                for media_type, schema in self.other_answers.items():
                    response.content[media_type] = OpenAPIMediaType(schema)
