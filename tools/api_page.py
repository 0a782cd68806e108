"""The part of docs/use/api.md that is made from the data plane's OpenAPI document.

`python -m tools.api_page` writes it; `make api` runs that.
"""

from __future__ import annotations

from collections.abc import Iterable

from litestar import Litestar

from gateway.app import ROUTES
from gateway.error_codes import CODES
from gateway.http.examples import curl, python
from gateway.http.openapi import describe, document
from gateway.http.reference import Fields, Reference, Route, reference
from gateway.http.request import GatewayRequest
from tools.source_tree import ROOT
from web.openapi import Requirements, StructSchemas

PAGE = ROOT / "docs/use/api.md"
MARK = "<!-- What follows is written by `make api`. -->\n"


def gateway_reference() -> Reference:
    app = Litestar(
        route_handlers=ROUTES,
        request_class=GatewayRequest,
        openapi_config=document(),
        plugins=[StructSchemas(), Requirements(describe)],
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
    yield from ("```sh", *curl(route), "```", "")
    yield from ("```python", *python(route), "```", "")


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
