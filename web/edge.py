"""ASGI middleware around every application: rejects ambiguous paths and headers, limits the rate of
requests without a key, and records refusals."""

from __future__ import annotations

import time

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from store.errors import ApiError, Invalid
from web.ambiguity import find_ambiguous_header, find_ambiguous_path
from web.anonymous import AnonymousLimit
from web.client_address import client_address
from web.error_answers import ErrorAnswer
from web.errors import Overloaded, TooMany
from web.headers import add_request_headers
from web.refusals import Refusals

PUBLIC = ("/docs", "/schema", "/version")
"""Routes that need no key, and below which no route needs one. Probes are not included, because
they have a fixed cost and are never refused."""
PROBES = ("/livez", "/readyz", "/health")
"""Probe routes. Their error statuses do not count as refusals."""
READINESS = ("/readyz", "/health")
UNTIL_THE_END = ("/livez", "/metrics")
"""Routes that are answered even while the server drains."""
JSON = [(b"content-type", b"application/json")]
NOT_READY = b'{"status":"unavailable","reason":"draining"}'
NOT_SERVED = (404, 405)
NO_LIMIT_LEFT = "too_many_anonymous_requests"


class Draining:
    """Flag that is on while the servers of a process shut down and refuse new requests."""

    def __init__(self) -> None:
        self.is_on = False


class Edge:
    """Middleware around one ASGI application."""

    def __init__(self, app: ASGIApp, refusals: Refusals, draining: Draining) -> None:
        self.num_open = 0
        """Number of requests that the application has not answered yet."""
        self._app = app
        self._refusals = refusals
        self._draining = draining
        self._limit = AnonymousLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._draining.is_on and scope["path"] not in UNTIL_THE_END:
            await self._refuse_draining(scope, receive, send)
        else:
            self.num_open += 1
            try:
                await self._answer(scope, receive, send)
            finally:
                self.num_open -= 1

    async def _answer(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        is_replaced = False

        async def watched(message: Message) -> None:
            """Records refusals. Replaces a 404 or 405 with a refusal if a client without a key has
            exceeded the rate limits."""
            nonlocal is_replaced
            if message["type"] == "http.response.start" and message["status"] >= 400:
                is_counted = "user" in scope or scope["method"] == "OPTIONS"
                if message["status"] in NOT_SERVED and not is_counted:
                    refusal = self._refusal_of(scope)
                    if refusal is not None:
                        is_replaced = True
                        await self._refuse(refusal, scope, receive, send)
                        return
                if path not in PROBES:
                    self._refusals.note_answer(scope, message["status"])
            if not is_replaced:
                await send(message)

        error = _check(scope)
        path = scope["path"]
        is_question = scope["method"] == "OPTIONS"
        if error is None and (is_question or path == "/" or path.startswith(PUBLIC)):
            error = self._refusal_of(scope)
        if error is not None:
            await self._refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, watched)

    async def _refuse_draining(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        if scope["path"] in READINESS:
            await send({"type": "http.response.start", "status": 503, "headers": JSON})
            await send({"type": "http.response.body", "body": NOT_READY, "more_body": False})
        else:
            error = Overloaded("The server is being stopped. Try again.", code="draining")
            await self._refuse(error, scope, receive, send)

    def _refusal_of(self, scope: Scope) -> ApiError | None:
        """Takes a token from the rate limits of requests without a key. Returns the refusal if a
        limit is exhausted."""
        match self._limit.take(client_address(scope), time.monotonic()):
            case "address":
                message = "Too many requests without an API key from this address."
                return TooMany(message, code=NO_LIMIT_LEFT)
            case "all":
                return Overloaded("Too many requests without an API key.", code=NO_LIMIT_LEFT)
            case _:
                return None

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        answer = ErrorAnswer(error, scope)

        async def numbered(message: Message) -> None:
            await add_request_headers(message, scope)
            await send(message)

        await answer(scope, receive, numbered)
        self._refusals.note_answer(scope, answer.status)


def _check(scope: HTTPScope) -> Invalid | None:
    """Returns the refusal if a proxy may have read the request differently, otherwise None."""
    if (reason := find_ambiguous_path(scope["raw_path"])) is not None:
        message = f"The path of the request is ambiguous: {reason}."
        return Invalid(message, code="ambiguous_path")
    if (reason := find_ambiguous_header(scope["headers"], scope["http_version"])) is not None:
        message = f"The headers of the request are ambiguous: {reason}."
        return Invalid(message, code="ambiguous_header")
    return None
