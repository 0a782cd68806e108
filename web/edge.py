"""ASGI middleware around every application: rejects ambiguous paths and headers, limits the rate of
requests without a key, and records refusals."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterable
from urllib.parse import unquote_to_bytes

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from store.errors import ApiError, Invalid
from web.error_answers import ErrorAnswer
from web.errors import Overloaded, TooMany
from web.held_bytes import HELD_ANSWER, AnswerBudget, HeldAnswer, held_body
from web.refusals import Refusals
from web.request_head import ON_ANSWER, add_request_headers, address_prefix, client_address
from web.token_buckets import TokenBuckets

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
ADDRESS_PER_S, ADDRESS_BURST = 5.0, 50
"""Requests per second, and maximum burst, of one address prefix. A reader of the API's description
needs a few requests per minute."""
ALL_PER_S, ALL_BURST = 50.0, 200
"""Requests per second, and maximum burst, of all addresses together. 50 requests of about 0.2 ms
each take 1 % of a core."""
MAX_ADDRESSES = 4096
"""Maximum number of address prefixes that have a bucket."""
MODELS = b"/v1/models/"
"""Path below which a slash may be percent-encoded, because official clients encode model names."""
KEY_PREFIX = b"lpx_"
"""Beginning of every key. A value of `x-api-key` without it, such as a client's key of another
server, is ignored if there is an `authorization` header."""
_PLAIN = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+)*/?\Z")
"""Matches paths whose segments have the form of RFC 3986, without percent-encoding and without
empty, `.` or `..` segments."""
_CHARACTER = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2}")
_NEEDLESS = re.compile(rb"%(?:[46][1-9A-Fa-f]|[57][0-9Aa]|3[0-9]|2[DdEe]|5[Ff]|7[Ee])")
"""Matches needless percent-encoding of a letter, a digit, or one of `-._~`."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
AT_MOST_ONCE = frozenset(
    (
        *(b"host", b"authorization", b"x-api-key"),
        *(b"content-type", b"idempotency-key", b"x-request-timeout"),
    )
)
"""Headers that may occur only once."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""Matches a valid Host header (https://www.rfc-editor.org/rfc/rfc9110#name-host-and-authority)."""


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


class AnonymousLimit:
    """One token bucket for each address prefix, and one for all addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = TokenBuckets(ALL_BURST / ALL_PER_S, clock=clock)
        self._addresses = TokenBuckets(ADDRESS_BURST / ADDRESS_PER_S, MAX_ADDRESSES, clock)

    def take(self, address: str | None) -> str | None:
        """Takes a token for a request. Returns None, or the name of the exhausted limit: `address`
        or `all`.

        `address` is None for a Unix socket. A Unix socket and loopback addresses have only the
        limit for all.
        """
        if self._all.wait_s("", 1 / ALL_PER_S):
            return "all"
        is_limited = address is not None and not ipaddress.ip_address(address).is_loopback
        if is_limited and self._addresses.take(address_prefix(address), 1 / ADDRESS_PER_S):
            return "address"
        self._all.charge("", 1 / ALL_PER_S)
        return None


def find_ambiguous_path(raw_path: bytes) -> str | None:
    """Returns the reason why a proxy may read the path differently than this server. Returns None
    if there is no such reason.

    `raw_path` is the path as it was sent, without the query.
    """
    if _PLAIN.match(raw_path):
        return None
    if b"\\" in raw_path:
        return "it has a backslash"
    if _CHARACTER.sub(b"", raw_path):
        return "it has a character that must be percent-encoded, or half of a percent-encoded one"
    if _NEEDLESS.search(raw_path):
        return "it percent-encodes a letter, a digit or one of '-._~'"
    if b"%2f" in raw_path.lower() and not raw_path.startswith(MODELS):
        return "it percent-encodes a slash"
    return _find_in_decoded(unquote_to_bytes(raw_path))


def _find_in_decoded(path: bytes) -> str | None:
    if _CONTROL.search(path) or b"\\" in path or b"%" in path:
        return "it percent-encodes a control character, a backslash or a percent sign"
    if not path.startswith(b"/") or b"//" in path:
        return "it has an empty segment"
    if {b".", b".."} & set(path.split(b"/")):
        return "it has a segment '.' or '..'"
    try:
        path.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    return None


def find_ambiguous_header(headers: Iterable[tuple[bytes, bytes]], version: str) -> str | None:
    """Returns the reason why a proxy may read the headers differently than this server. Returns
    None if there is no such reason.

    `headers` have names in lower case. `version` is the HTTP version.
    """
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in AT_MOST_ONCE:
            if name in seen:
                return f"there is more than one '{name.decode()}'"
            seen[name] = value
    host = seen.get(b"host")
    if host is None and version != "1.0":
        return "there is no 'host'"
    if host is not None and not _HOST.fullmatch(host):
        return "'host' is not a name or address with a port"
    key, authorization = seen.get(b"x-api-key"), seen.get(b"authorization")
    if key is not None and authorization is not None and key.strip().startswith(KEY_PREFIX):
        scheme, _, text = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or text.strip() != key.strip():
            return "'x-api-key' and 'authorization' have two keys"
    return None
