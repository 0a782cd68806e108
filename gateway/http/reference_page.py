"""Makes the API reference as one HTML page, which loads no scripts or fonts from other servers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from gateway.error_codes import CODES
from gateway.http.call_examples import curl, python
from gateway.http.reference import Fields, Reference, Route
from gateway.http.welcome_page import STYLE


def reference_page(reference: Reference, version: str) -> str:
    """Returns the page as HTML. `version` is loraplex's."""
    navigation = "".join(
        _link(anchor(route), f"{route.method} {route.paths[0]}") for route in reference.routes
    )
    navigation += "".join(_link(each, each) for each in ("objects", "headers", "errors"))
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>loraplex API</title><style>{STYLE}</style></head><body>",
            f"<h1>loraplex API</h1><p>Version {escape(version)}. ",
            "Keys: <code>Authorization: Bearer lpx_...</code> or <code>x-api-key</code>. ",
            'The same as OpenAPI: <a href="/schema">/schema</a>.</p>',
            f"<nav><ul>{navigation}</ul></nav>",
            *map(_route, reference.routes),
            '<h2 id="objects">Objects in bodies</h2>',
            *(
                f"<h3><code>{escape(fields.name)}</code></h3>{_fields(fields)}"
                for fields in reference.objects
            ),
            '<h2 id="headers">Headers of answers</h2>',
            _table(("header", "value", "meaning"), reference.headers),
            '<h2 id="errors">Error codes</h2>',
            _table(
                ("code", "status", "meaning"),
                [(f"`{code}`", str(status), text) for code, (status, text) in CODES.items()],
            ),
            "</body></html>",
        )
    )


def _link(anchor: str, text: str) -> str:
    return f'<li><a href="#{anchor}">{escape(text)}</a></li>'


def anchor(route: Route) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{route.method} {route.paths[0]}".lower()).strip("-")


def _route(route: Route) -> str:
    parts = [
        f'<h2 id="{anchor(route)}"><code>{route.method} {escape(route.paths[0])}</code></h2>',
        f"<p>{_inline(route.text)}</p>",
    ]
    if route.paths[1:]:
        parts.append(f"<p>Also {_inline(', '.join(f'`{path}`' for path in route.paths[1:]))}.</p>")
    if route.parameters:
        parts.append(_table(("parameter", "value", "meaning"), route.parameters))
    if route.body is not None:
        parts.append(_fields(route.body))
    statuses = ", ".join(map(str, route.statuses))
    parts.append(f"<p>Answers {statuses}{', also as a stream' if route.streams else ''}.</p>")
    parts += (f"<pre>{escape(chr(10).join(lines))}</pre>" for lines in (curl(route), python(route)))
    return "".join(parts)


def _fields(fields: Fields) -> str:
    return _table(("field", "value", ""), [(f"`{name}`", *rest) for name, *rest in fields.fields])


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _inline(text: str) -> str:
    """Returns the text as HTML, with text in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
