"""`python -m tools.api_page` (run by `make api`): writes the API reference from the data plane's
OpenAPI document. The reference consists of parts of the pages in docs/use.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from gateway.app import ROUTES
from gateway.error_codes import CODES
from gateway.http.call_examples import curl, python
from gateway.http.openapi import document
from gateway.http.reference import Fields, Json, Reference, Route, reference
from tools.source_tree import ROOT

FOLDER = ROOT / "docs/use"
OVERVIEW = "api.md"
PAGES: Mapping[str, tuple[str, ...]] = {
    "api-chat.md": ("/v1/chat/completions", "/v1/completions"),
    "api-responses.md": ("/v1/responses",),
    "api-messages.md": ("/v1/messages", "/v1/messages/count_tokens"),
    "embeddings.md": ("/v1/embeddings", "/v2/embed", "/v1/score", "/v1/rerank"),
    "api-other.md": (
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/livez",
        "/readyz",
        "/version",
        "/",
    ),
}
"""Preferred paths of the routes that each page describes."""
MARK = "<!-- What follows is written by `make api`. -->\n"


def gateway_document() -> Json:
    return msgspec.json.decode(msgspec.json.encode(document(ROUTES)))


def pages() -> dict[Path, str]:
    """Returns the text of each page, in which the generated part is up to date."""
    found = reference(gateway_document())
    made = {OVERVIEW: _overview(found)}
    made |= {page: _reference(found, paths) for page, paths in PAGES.items()}
    return {FOLDER / page: _kept(FOLDER / page) + "\n".join(made[page]) for page in made}


def _kept(page: Path) -> str:
    """Returns the part of the page that people write."""
    written, mark, _ = page.read_text().partition(MARK)
    assert mark, f"{page} has lost its mark"
    return written + mark + "\n"


def _overview(found: Reference) -> Iterator[str]:
    page_of = {path: page for page, paths in PAGES.items() for path in paths}
    rows = [
        (
            f"`{route.method} {path}`",
            "yes" if route.needs_key else "no",
            route.text,
            f"[{page_of[route.paths[0]]}]({page_of[route.paths[0]]})",
        )
        for route in found.routes
        for path in route.paths
    ]
    yield from ("## Routes", "", *_table(("route", "key", "what it does", "described in"), rows))
    headers = [(f"`{name}`", *rest) for name, *rest in found.headers]
    yield from ("## Headers of answers", "", *_table(("header", "value", "meaning"), headers))
    codes = [(f"`{code}`", str(status), text) for code, (status, text) in CODES.items()]
    yield from ("## Error codes", "", *_table(("code", "status", "meaning"), codes))


def _reference(found: Reference, paths: Iterable[str]) -> Iterator[str]:
    """Yields the lines for the routes with these paths, and for the objects in their bodies."""
    routes = [route for path in paths for route in found.routes if route.paths[0] == path]
    for route in routes:
        yield from _route(route)
    objects = _objects([route.body for route in routes if route.body], found.objects)
    if objects:
        yield from ("## Objects in bodies", "")
        for fields in objects:
            yield from _object(fields)


def _objects(bodies: Iterable[Fields], objects: Iterable[Fields]) -> list[Fields]:
    """Returns the objects that the bodies refer to, directly or by another object."""
    known = {each.name: each for each in objects}
    found: dict[str, Fields] = {}
    todo = list(bodies)
    while todo:
        for row in todo.pop().fields:
            for name in re.findall(r"`(\w+)`", row.kind):
                if name in known and name not in found:
                    found[name] = known[name]
                    todo.append(known[name])
    return [found[name] for name in sorted(found)]


def _route(route: Route) -> Iterator[str]:
    """Yields the lines of a route's section: its examples, then its parameters, body and
    answers."""
    path = route.paths[0]
    yield from (f"## `{route.method} {path}`", "", *_paragraph(route.text), "")
    if route.paths[1:]:
        others = ", ".join(f"`{each}`" for each in route.paths[1:])
        yield from (f"The same route also has the path {others}.", "")
    yield from ("```sh", *curl(route), "```", "")
    yield from ("```python", *python(route), "```", "")
    if route.parameters:
        rows = [(f"`{name}`", *rest) for name, *rest in route.parameters]
        yield from _table(("parameter", "value", "meaning"), rows)
    if route.body is not None:
        yield from _fields(route.body)
    statuses = ", ".join(map(str, route.statuses))
    stream = " A status of 200 may begin a stream." if route.streams else ""
    named = ", ".join(f"`{name}`" for name in route.headers)
    headers = f" Headers of the answer: {named}." if named else ""
    yield from (*_paragraph(f"Status codes: {statuses}.{stream}{headers}"), "")


def _object(fields: Fields) -> Iterator[str]:
    yield from (f"### `{fields.name}`", "")
    yield from _fields(fields) if fields.fields else ("No fields but `type`.", "")


def _fields(fields: Fields) -> Iterator[str]:
    rows = ((f"`{name}`", *rest) for name, *rest in fields.fields)
    return _table(("field", "value", "note"), rows)


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
