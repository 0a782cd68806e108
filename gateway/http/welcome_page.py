"""Page that a browser shows for a gateway's address."""

from __future__ import annotations

from html import escape

from gateway.http.reference_page import STYLE


def welcome_page(version: str) -> str:
    """Returns a page that links to the API reference and shows a first request."""
    request = (
        "curl $URL/v1/chat/completions -H 'Authorization: Bearer '$KEY "
        "-H 'Content-Type: application/json' \\\n"
        '  -d \'{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}\''
    )
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>loraplex</title><style>{STYLE}</style></head><body>",
            f"<h1>loraplex</h1><p>Version {escape(version)}. This server answers the OpenAI and ",
            "Anthropic APIs. Their base URLs end with <code>/v1</code> and with nothing.</p>",
            "<p>The models of your key, and a first chat:</p>",
            "<pre>curl $URL/v1/models -H 'Authorization: Bearer '$KEY</pre>",
            f"<pre>{escape(request)}</pre>",
            '<ul><li><a href="/docs">/docs</a>: every route, field and error code</li>',
            '<li><a href="/schema">/schema</a>: the same as OpenAPI</li>',
            '<li><a href="/readyz">/readyz</a>: whether requests can be served</li>',
            '<li><a href="/version">/version</a></li></ul></body></html>',
        )
    )
