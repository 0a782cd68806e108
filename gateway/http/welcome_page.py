"""Page that a browser shows for a gateway's address."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .875em; }
pre { padding: .75rem; overflow-x: auto; border: 1px solid #8886; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; margin: .75rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid #8886; overflow-wrap: break-word; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8886; padding-top: 1rem; }
nav li { display: inline-block; margin-right: 1rem; }
nav ul { padding: 0; }
td:first-child { white-space: nowrap; }
@media (max-width: 45rem) {
  thead { display: none; }
  tr { display: block; padding: .25rem 0; border-bottom: 1px solid #8886; }
  td { display: block; padding: 0; border: 0; }
  td:first-child { white-space: normal; font-weight: 600; }
}
"""


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
