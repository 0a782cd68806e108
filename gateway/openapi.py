"""The OpenAPI document: routes from the framework, bodies from the structs that decode them."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import MediaType, Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

from gateway.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

BODIES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")


class Document(OpenAPIRenderPlugin):
    """Serves the document as JSON, and nothing that loads scripts from elsewhere."""

    def __init__(self) -> None:
        super().__init__(path="/openapi.json", media_type=MediaType.JSON)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return msgspec.json.encode(with_bodies(openapi_schema))


def with_bodies(schema: dict[str, Any]) -> dict[str, Any]:
    bodies, components = msgspec.json.schema_components(
        BODIES.values(), ref_template="#/components/schemas/{name}"
    )
    for path, body in zip(BODIES, bodies, strict=True):
        schema["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    for path in COMPLETIONS:
        schema["paths"][path]["post"]["responses"]["200"]["content"] = {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        }
    schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return schema
