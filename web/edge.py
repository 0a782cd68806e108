"""ASGI middleware around every application: rejects ambiguous paths and headers, limits the rate of
requests without a key, and records refusals."""

from __future__ import annotations

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from store.errors import ApiError, Invalid
from web.ambiguity import find_ambiguous_header, find_ambiguous_path
from web.anonymous import AnonymousLimit
from web.body_budget import held_body
from web.client_address import client_address
from web.error_answers import ErrorAnswer
from web.errors import Overloaded, TooMany
from web.headers import ON_ANSWER, add_request_headers
from web.held_answer import HELD_ANSWER, AnswerBudget, HeldAnswer
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
CONNECTION = "connection"
"""Key in a request's state for its connection."""
IS_PREFLIGHT = "is_preflight"
"""Key in a request's state that is set if the request is a preflight request of an allowed
origin."""
NO_LIMIT_LEFT = "too_many_anonymous_requests"


class Draining:
    """Flag that is on while the servers of a process shut down and refuse new requests."""

    def __init__(self) -> None:
        self.is_on = False


class Edge:
    """Middleware around one ASGI application."""

    def __init__(
        self, app: ASGIApp, refusals: Refusals, draining: Draining, answers: AnswerBudget
    ) -> None:
        self.num_open = 0
        """Number of requests that the application has not answered yet."""
        self._app = app
        self._refusals = refusals
        self._draining = draining
        self._answers = answers
        self._pages = AnonymousLimit()
        """Limit of requests for public pages."""
        self._refused = AnonymousLimit()
        """Limit of refused requests without a key. It is not the limit of pages, so that neither
        kind of request uses up the other's."""

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
        if scope["method"] == "HEAD":
            # The server leaves out the body of the answer to the original request.
            scope = {**scope, "method": "GET"}
        state = scope["state"]
        state[HELD_ANSWER] = answer = HeldAnswer(self._answers, held_body(scope))
        is_replaced = False

        async def watched(message: Message) -> None:
            """Records refusals. Replaces an answer that exceeds a limit with a refusal."""
            nonlocal is_replaced
            if message["type"] == "http.response.start":
                refusal = self._refusal_of(scope, message["status"])
                if refusal is None and message["status"] < 400:
                    refusal = answer.refusal_of(message)
                if refusal is not None:
                    is_replaced = True
                    # The request was charged for its answer, and is not charged for the refusal.
                    state.pop(ON_ANSWER, None)
                    await self._refuse(refusal, scope, receive, send)
                elif message["status"] >= 400 and path not in PROBES:
                    self._refusals.note_answer(scope, message["status"])
            if not is_replaced:
                await answer.send(message, send, state[CONNECTION])

        error: ApiError | None = _check(scope)
        path = scope["path"]
        is_page = path == "/" or path.startswith(PUBLIC)
        if error is None and is_page and scope["method"] != "OPTIONS":
            error = _refusal_by(self._pages, scope)
        try:
            if error is not None:
                await self._refuse(error, scope, receive, send)
            else:
                await self._app(scope, receive, watched)
        finally:
            answer.end()

    async def _refuse_draining(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        if scope["path"] in READINESS:
            await send({"type": "http.response.start", "status": 503, "headers": JSON})
            await send({"type": "http.response.body", "body": NOT_READY, "more_body": False})
        else:
            error = Overloaded("The server is being stopped. Try again.", code="draining")
            await self._refuse(error, scope, receive, send)

    def _refusal_of(self, scope: HTTPScope, status: int) -> ApiError | None:
        """Returns the refusal if a client without a key asked for a route that is not served, or
        sent OPTIONS, and has exceeded the rate limits. An allowed preflight request takes no token,
        because a page's requests would otherwise fail when others use up the limits."""
        is_question = scope["method"] == "OPTIONS" and IS_PREFLIGHT not in scope["state"]
        if "user" in scope or not (is_question or status in NOT_SERVED):
            return None
        return _refusal_by(self._refused, scope)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        answer = ErrorAnswer(error, scope)

        async def numbered(message: Message) -> None:
            await add_request_headers(message, scope)
            await send(message)

        await answer(scope, receive, numbered)
        self._refusals.note_answer(scope, answer.status)


def _refusal_by(limit: AnonymousLimit, scope: HTTPScope) -> ApiError | None:
    """Takes a token from a limit of requests without a key. Returns the refusal if it is
    exhausted."""
    match limit.take(client_address(scope)):
        case "address":
            message = "Too many requests without an API key from this address."
            return TooMany(message, code=NO_LIMIT_LEFT)
        case "all":
            return Overloaded("Too many requests without an API key.", code=NO_LIMIT_LEFT)
        case _:
            return None


def _check(scope: HTTPScope) -> Invalid | None:
    """Returns the refusal if a proxy may have read the request differently, otherwise None."""
    if (reason := find_ambiguous_path(scope["raw_path"])) is not None:
        message = f"The path of the request is ambiguous: {reason}."
        return Invalid(message, code="ambiguous_path")
    if (reason := find_ambiguous_header(scope["headers"], scope["http_version"])) is not None:
        message = f"The headers of the request are ambiguous: {reason}."
        return Invalid(message, code="ambiguous_header")
    return None
