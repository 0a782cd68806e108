"""The part of docs/use/api.md that is made from the data plane's OpenAPI document.

`python -m tests.gateway.http.api_page` writes it; `make api` runs that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from litestar import Litestar

from admin.openapi import StructSchemas
from gateway.app import ROUTES
from gateway.error_codes import CODES
from gateway.http.openapi import Requirements, document
from gateway.http.reference import Fields, Reference, Route, reference
from gateway.http.request import GatewayRequest
from tests.house import ROOT

PAGE = ROOT / "docs/use/api.md"
MARK = "<!-- What follows is written by `make api`. -->\n"
URL = "http://127.0.0.1:8000"
MODEL = "support-bot"
CLIENTS = {
    "OpenAI": f'OpenAI(base_url="{URL}/v1", api_key=os.environ["KEY"])',
    "Anthropic": f'Anthropic(base_url="{URL}", api_key=os.environ["KEY"])',
}
CALLS: Mapping[str, tuple[str, str, str]] = {
    "/v1/chat/completions": (
        "OpenAI",
        "chat.completions.create",
        "answer.choices[0].message.content",
    ),
    "/v1/completions": ("OpenAI", "completions.create", "answer.choices[0].text"),
    "/v1/responses": ("OpenAI", "responses.create", "answer.output_text"),
    "/v1/embeddings": ("OpenAI", "embeddings.create", "len(answer.data[0].embedding)"),
    "/v1/messages": ("Anthropic", "messages.create", "answer.content[0].text"),
    "/v1/messages/count_tokens": ("Anthropic", "messages.count_tokens", "answer.input_tokens"),
    "/v1/models": ("OpenAI", "models.list", "[model.id for model in answer]"),
    "/v1/models/{model}": ("OpenAI", "models.retrieve", "answer.root"),
}
"""Route to the official client, its method, and what to show of the answer; of others none has
one."""


def gateway_reference() -> Reference:
    app = Litestar(
        route_handlers=ROUTES,
        request_class=GatewayRequest,
        openapi_config=document(),
        plugins=[StructSchemas(), Requirements()],
    )
    return reference(app.openapi_schema.to_schema())


def made() -> str:
    """The reference as Markdown."""
    found = gateway_reference()
    codes = [(f"`{code}`", str(status), text) for code, (status, text) in CODES.items()]
    headers = [(f"`{name}`", *rest) for name, *rest in found.headers]
    return "\n".join(
        (
            "## Routes",
            "",
            *_table(
                ("route", "key", "what"),
                (
                    (f"`{route.method} {path}`", "yes" if route.needs_key else "no", route.text)
                    for route in found.routes
                    for path in route.paths
                ),
            ),
            *(line for route in found.routes for line in _route(route)),
            "## Objects in bodies",
            "",
            *(line for fields in found.objects for line in _object(fields)),
            "## Headers of answers",
            "",
            *_table(("header", "value", "when"), headers),
            "## Error codes",
            "",
            *_table(("code", "status", "meaning"), codes),
        )
    )


def _route(route: Route) -> Iterable[str]:
    path = route.paths[0]
    yield from (f"## `{route.method} {path}`", "", route.text or "The version.", "")
    if route.paths[1:]:
        yield from (f"Also {', '.join(f'`{each}`' for each in route.paths[1:])}.", "")
    if route.parameters:
        rows = [(f"`{name}`", *rest) for name, *rest in route.parameters]
        yield from _table(("parameter", "value", "meaning"), rows)
    if route.body is not None:
        yield from _fields(route.body)
    statuses = ", ".join(map(str, route.statuses))
    stream = ", 200 as a stream too" if route.streams else ""
    named = ", ".join(f"`{name}`" for name in route.headers)
    yield from (f"Answers {statuses}{stream}." + (f" Headers: {named}." if named else ""), "")
    yield from ("```sh", *_curl(route), "```", "")
    yield from ("```python", *_python(route), "```", "")


def _curl(route: Route) -> Iterable[str]:
    url = URL + route.paths[0].replace("{model}", MODEL)
    command = {"HEAD": "curl -sI", "GET": "curl -s", "POST": "curl -s"}[route.method]
    key = '  -H "Authorization: Bearer $KEY"' if route.needs_key else ""
    body = _example(route)
    yield f"{command} {url}" + (" \\" if key else "")
    if body:
        yield f'{key} -H "Content-Type: application/json" \\'
        yield f"  -d '{json.dumps(body)}'"
    elif key:
        yield key


def _python(route: Route) -> Iterable[str]:
    path, body = route.paths[0], _example(route)
    if path not in CALLS:
        options = {"timeout": "60"}
        if body:
            options = {"json": "body"} | options
        if route.needs_key:
            options = {"headers": '{"Authorization": f"Bearer {os.environ[\'KEY\']}"}'} | options
            yield from ("import os", "")
        yield from ("import httpx", "")
        if body:
            yield "body = {"
            yield from (f"    {json.dumps(name)}: {json.dumps(body[name])}," for name in body)
            yield "}"
        yield f"answer = httpx.{route.method.lower()}("
        yield f'    "{URL}{path}",'
        yield from (f"    {name}={value}," for name, value in options.items())
        yield ")"
        shown = "answer.status_code" if route.method == "HEAD" else "answer.json()"
        yield f"print({shown})"
        return
    client, call, shown = CALLS[path]
    yield from ("import os", "", f"from {client.lower()} import {client}", "")
    yield f"client = {CLIENTS[client]}"
    arguments = [f"{name}={json.dumps(value)}" for name, value in (body or {}).items()]
    if "{model}" in path:
        arguments = [f'"{MODEL}"']
    if len(arguments) < 2:
        yield f"answer = client.{call}({''.join(arguments)})"
    else:
        yield from (f"answer = client.{call}(", *(f"    {each}," for each in arguments), ")")
    yield f"print({shown})"


def _example(route: Route) -> Mapping[str, Any] | None:
    return route.body.example if route.body else None


def _object(fields: Fields) -> Iterable[str]:
    yield from (f"### `{fields.name}`", "")
    yield from _fields(fields) if fields.fields else ("No fields but `type`.", "")


def _fields(fields: Fields) -> Iterable[str]:
    return _table(("field", "value", ""), ((f"`{name}`", *rest) for name, *rest in fields.fields))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterable[str]:
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def page() -> str:
    """The page with its made part made anew."""
    written, mark, _ = PAGE.read_text().partition(MARK)
    assert mark, "the page has lost its mark"
    return written + mark + "\n" + made()


if __name__ == "__main__":
    PAGE.write_text(page())
