"""Cross-origin requests of pages in browsers, as the Fetch standard defines them (CORS)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from litestar.types import HTTPScope, Message, Scope, Send

from web.edge import IS_PREFLIGHT
from web.headers import add_request_headers, find_header, number_request

EXPOSED = b", ".join(
    [
        *(b"x-request-id", b"request-id", b"openai-processing-ms"),
        *(b"retry-after", b"retry-after-ms", b"x-should-retry"),
        *(
            f"x-ratelimit-{what}-{unit}".encode()
            for unit in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
        *(b"loraplex-worker", b"loraplex-adapter-version", b"loraplex-dropped"),
    ]
)
"""Headers of an answer that a page may read."""
METHODS = b"GET, HEAD, POST"
KNOWN_FOR_S = 7200
"""Seconds for which a browser may cache the answer to a preflight request. No browser caches it
longer."""
HEADER_NAMES = re.compile(r"[A-Za-z0-9, -]{0,2048}")

Headers = list[tuple[bytes, bytes]]


class CrossOrigin:
    """Origins whose pages may call the API. API keys are sent in a header; cookies are not read."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: origins such as `https://app.example.com`, or `*` for all origins."""
        self._origins = frozenset(origins)

    def headers(self, scope: Scope) -> Headers:
        """Returns the headers to add to the answer to this request."""
        # `vary` keeps shared caches from answering one origin with the answer to another origin.
        varies = [] if "*" in self._origins or not self._origins else [(b"vary", b"origin")]
        allowed = self._allowed(scope)
        if allowed is None:
            return varies
        return [
            (b"access-control-allow-origin", allowed.encode()),
            *varies,
            (b"access-control-expose-headers", EXPOSED),
        ]

    def _allowed(self, scope: Scope) -> str | None:
        """Returns the value of `access-control-allow-origin`. Returns None if the request does not
        come from a page, or its origin may not call."""
        origin = find_header(scope, b"origin")
        if origin is None or not self._origins & {"*", origin}:
            return None
        return "*" if "*" in self._origins else origin

    async def answers(self, scope: HTTPScope, send: Send) -> bool:
        """Answers the request if it is a preflight request of an allowed origin. Returns whether it
        was answered."""
        if scope["method"] != "OPTIONS" or self._allowed(scope) is None:
            return False
        if find_header(scope, b"access-control-request-method") is None:
            return False
        wanted = find_header(scope, b"access-control-request-headers") or ""
        if not HEADER_NAMES.fullmatch(wanted):
            return False
        scope["state"][IS_PREFLIGHT] = True
        number_request(scope)
        start: Message = {
            "type": "http.response.start",
            "status": 204,
            "headers": [
                *self.headers(scope),
                (b"access-control-allow-methods", METHODS),
                (b"access-control-allow-headers", wanted.encode()),
                (b"access-control-max-age", b"%d" % KNOWN_FOR_S),
            ],
        }
        await add_request_headers(start, scope)
        await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True
