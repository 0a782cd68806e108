"""Example calls of each data plane route, in curl and Python, for the API reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.http.reference import Route

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
"""Official client, method of the client, and expression to print, by path. Other routes have no
official client."""


def curl(route: Route) -> Iterator[str]:
    """Yields the lines of a shell command."""
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


def python(route: Route) -> Iterator[str]:
    """Yields the lines of a script, which uses the official client if there is one."""
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
