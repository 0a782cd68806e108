"""The OpenAPI document: routes from the framework, bodies from the structs that decode them, and
what each route may refuse."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import MediaType, Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

from gateway.dialects.schemas import (
    MAX_BODY_BYTES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.http.request import MAX_TIMEOUT_S

BODIES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
PUBLIC = ("/livez", "/readyz", "/health", "/version")
EXAMPLES: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is my parcel?"}],
    },
    "/v1/completions": {"model": "support-bot@staging", "prompt": "Once", "max_tokens": 16},
    "/tokenize": {"model": "support-bot", "prompt": "Once"},
    "/detokenize": {"model": "support-bot", "tokens": [12, 7]},
}
REFUSALS = {
    400: "The request is wrong or asks for what is not supported; `param` names the field.",
    401: "No API key, or none that is valid.",
    403: "The key may not infer, or not from this address.",
    404: "No such model for this tenant and key.",
    408: "The rest of the request did not come, or too slowly.",
    409: "The adapter's chat template is not approved.",
    413: f"More than {MAX_BODY_BYTES} bytes.",
    429: "A limit of the tenant or the key is reached; when it frees is in Retry-After.",
    500: "The worker failed, or workers were lost of this request.",
    503: "Overloaded, or nobody there to serve it now.",
    504: "No answer began within the time that the request had (`x-request-timeout`).",
}
TIMEOUT: dict[str, Any] = {
    "name": "x-request-timeout",
    "in": "header",
    "description": "Seconds until nobody wants a first token any more; 600 unless given.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
ALWAYS: dict[str, Any] = {
    "x-request-id": {"required": True, "schema": {"type": "string", "pattern": "^req_"}},
    "openai-processing-ms": {"required": True, "schema": {"type": "integer", "minimum": 0}},
}
SECONDS: dict[str, Any] = {"schema": {"type": "integer", "minimum": 1}}
LIMITS: dict[str, Any] = {
    f"x-ratelimit-{what}-{unit}": {
        "description": "Where the tenant or the key has such a limit.",
        "schema": {"type": "string" if what == "reset" else "integer"},
    }
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
SERVED: dict[str, Any] = {
    "loraplex-worker": {"required": True, "schema": {"type": "string"}},
    "loraplex-adapter-version": {
        "description": "Where the model is an adapter.",
        "schema": {"type": "integer", "minimum": 1},
    },
}


class ErrorDetails(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetails


class Answer(msgspec.Struct, frozen=True):
    """Of a completion; fields as OpenAI's."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class Document(OpenAPIRenderPlugin):
    """Serves the document as JSON, and nothing that loads scripts from elsewhere. It is made at the
    first request: 20 ms of CPU time."""

    def __init__(self) -> None:
        super().__init__(path="/openapi.json", media_type=MediaType.JSON)
        self._made: bytes | None = None

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        if self._made is None:
            self._made = msgspec.json.encode(complete(openapi_schema))
        return self._made


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    """The framework's document with what it cannot know."""
    kinds = [*BODIES.values(), ErrorBody, Answer]
    bodies, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    refusal, answer = bodies[-2:]
    for path, body in zip(BODIES, bodies, strict=False):
        content = {"schema": body, "example": EXAMPLES[path]}
        schema["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": content},
        }
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            responses = operation["responses"]
            responses["200"]["headers"] = dict(ALWAYS)
            if path not in PUBLIC:
                responses["200"]["headers"] |= LIMITS
            if path in COMPLETIONS:
                operation["parameters"] = [TIMEOUT]
                responses["200"]["headers"] |= SERVED
                responses["200"]["content"] = {
                    "application/json": {"schema": answer},
                    "text/event-stream": {"schema": {"type": "string"}},
                }
            if path in PUBLIC:
                operation["security"] = []
                if path == "/version":
                    responses |= {str(status): _refusal(status, refusal) for status in (429, 503)}
            else:
                operation["security"] = [{"key": ["inference"]}]
                responses.pop("400", None)
                responses |= {str(status): _refusal(status, refusal) for status in _statuses(path)}
    for path in ("/readyz", "/health"):
        responses = schema["paths"][path]["get"]["responses"]
        responses["503"] = responses["200"] | {"description": "Not ready; `reason` says why."}
    parts = schema.setdefault("components", {})
    parts.setdefault("schemas", {}).update(components)
    parts["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "bearerFormat": "lpx_..."}
    }
    return schema


def _statuses(path: str) -> list[int]:
    """Of refusals."""
    found = [401, 403, 429, 503]
    if path in BODIES:
        found += [400, 404, 408, 409, 413]
    if path in COMPLETIONS:
        found += [500, 504]
    if path.endswith("{model}"):
        found += [400, 404]
    return sorted(found)


def _refusal(status: int, body: dict[str, Any]) -> dict[str, Any]:
    headers = dict(ALWAYS)
    if status == 401:
        headers["www-authenticate"] = {"required": True, "schema": {"const": "Bearer"}}
    if status in (429, 503):
        headers |= {"retry-after": SECONDS, "retry-after-ms": SECONDS}
    if status in (409, 429, 500, 504):
        headers["x-should-retry"] = {"schema": {"const": "false"}}
    return {
        "description": REFUSALS[status],
        "headers": headers,
        "content": {"application/json": {"schema": body}},
    }
