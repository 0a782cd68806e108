"""Application of the data plane: finds the route of a request, and runs it. Lets pages of other
origins call the API (CORS)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from traceback import format_exc
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from gateway.exceptions import MethodNotAllowed, RouteNotFound, forget_frames, of_worker
from gateway.http.request import HttpRequest
from gateway.requests.services import Gateway
from web.decoding import decoder_of
from web.edge import IS_PREFLIGHT
from web.error_answers import ErrorAnswer
from web.request_head import add_request_headers, find_header, number_request

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

MAX_SHOWN = 100
"""Maximum characters of an unknown path that are repeated in the answer."""
DOCUMENTS = {
    "/openapi.json": "/schema",
    "/swagger": "/docs",
    "/swagger-ui": "/docs",
    "/redoc": "/docs",
    "/api": "/docs",
}
PREFIXES = ("/openai", "/api", "/anthropic")
"""Prefixes that other servers put before /v1."""
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


class Answer(Generic[T]):
    """Whole answer: JSON of `content`, or `content` itself if it is bytes."""

    def __init__(
        self,
        content: T,
        status: int = 200,
        headers: Sequence[tuple[bytes, bytes]] = (),
        media_type: bytes = b"application/json",
    ) -> None:
        self._body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        self._status = status
        self.headers = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % len(self._body)),
            *headers,
        ]

    async def __call__(self, _scope: Scope, _receive: Receive, send: Any) -> None:
        start = {"type": "http.response.start", "status": self._status, "headers": self.headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._body, "more_body": False})


class Route:
    """Function that answers the requests for some paths.

    The function takes the request, then the decoded body if it has a parameter `data`, or the rest
    of the path if it has a parameter `rest`. It returns an ASGI application, which raises
    exceptions only if it has not sent anything yet.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[ASGIApp]],
        method: str,
        paths: Sequence[str],
        *,
        needs: str | None,
        on_worker: bool = False,
        in_document: bool = True,
    ) -> None:
        """`needs` is the scope that a key must have, or None if no key is needed. `on_worker`:
        whether a worker runs the request. A path whose last segment is in braces stands for all
        paths with that beginning."""
        self.function = function
        self.method = method
        self.paths = paths
        self.needs = needs
        self.on_worker = on_worker
        self.in_document = in_document
        hints = get_type_hints(function)
        self.body: Any = hints.get("data")
        self.answer: Any = hints["return"]
        # Creating a decoder takes up to 80 ms, which would delay the first request.
        self._decoder = None if self.body is None else decoder_of(self.body)

    async def __call__(self, request: HttpRequest, rest: str) -> ASGIApp:
        """Returns the answer to a request. `rest` is the end of its path, after the route's."""
        trace = request.context.trace
        if rest:
            request.scope["path_template"] = self.paths[0]
        if not self.on_worker:
            trace.drop_phases()
        if self.needs is not None:
            await request.check_caller(self.needs, on_worker=self.on_worker)
        if self._decoder is None:
            return await (self.function(request, rest) if rest else self.function(request))
        body = await request.decode(self._decoder)
        trace.event("body_read")
        answer = await self.function(request, body)
        # From here on, the request needs only its tokens, whose number is limited.
        del body
        request.context.body.release()
        return answer


def _route(method: str, *paths: str, needs: str | None = None, **options: bool) -> Any:
    """Returns a decorator that makes a Route of a function."""

    def make(function: Any) -> Route:
        return Route(function, method, paths, needs=needs, **options)

    return make


get, post = partial(_route, "GET"), partial(_route, "POST")


class DataPlane:
    """Application of the data plane."""

    def __init__(
        self,
        gateway: Gateway,
        routes: Sequence[Route],
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        cross_origin: CrossOrigin | None,
    ) -> None:
        """`lifespan` is the context in which requests are served. `cross_origin`: origins whose
        pages may call the API. None allows no other origin."""
        self.gateway = gateway
        self.routes = routes
        self.lifespan = lifespan
        self._cross_origin = cross_origin
        served = [(path.partition("{"), route) for route in routes for path in route.paths]
        self._exact = {path: route for (path, brace, _), route in served if not brace}
        self._prefixes = {path: route for (path, brace, _), route in served if brace}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        more: Headers = []
        if self._cross_origin is not None:
            if await self._cross_origin.answers(scope, send):
                return
            more = self._cross_origin.headers(scope)

        async def numbered(message: Any) -> None:
            if message["type"] == "http.response.start":
                await add_request_headers(message, scope)
                message["headers"] += more
            await send(message)

        request = HttpRequest(self.gateway, scope, receive)
        with request.context as context:
            try:
                answer = await self._answer(request, scope["method"], scope["path"])
                await answer(scope, receive, numbered)
            except Exception as error:
                context.failure = error
                try:
                    await ErrorAnswer(of_worker(error), scope)(scope, receive, numbered)
                finally:
                    forget_frames(error)
            await context.await_reports()

    async def _answer(self, request: HttpRequest, method: str, path: str) -> ASGIApp:
        """Returns the answer to a request. Raises ApiError or WorkerFailed."""
        route, rest = self._exact.get(path), ""
        if route is None:
            route, rest = self._find(method, path)
        if method == route.method:
            return await route(request, rest)
        if method != "OPTIONS":
            raise MethodNotAllowed(f"{route.method}, OPTIONS")
        options = Answer(b"", 204)
        options.headers = [(b"allow", ", ".join(sorted((route.method, "OPTIONS"))).encode())]
        return options

    def _find(self, method: str, path: str) -> tuple[Route, str]:
        """Returns the route of a path that is not the exact path of one, and the rest of the path.
        Raises RouteNotFound."""
        stripped = path.rstrip("/")
        if (route := self._exact.get(stripped)) is not None:
            return route, ""
        for prefix, route in self._prefixes.items():
            if stripped.startswith(prefix):
                return route, stripped.removeprefix(prefix)
        raise self.not_found(method, path)

    def not_found(self, method: str, path: str) -> RouteNotFound:
        """Returns the error for a path that is not served. It suggests a similar path."""
        message = f"There is no route {method} {path[:MAX_SHOWN]}."
        meant = find_meant_path(path, self._exact)
        if meant is None:
            return RouteNotFound(message + " GET /docs lists the routes.")
        return RouteNotFound(f"{message} Did you mean {meant}? Check the client's base URL.")

    async def _live(self, receive: Receive, send: Any) -> None:
        """Runs the lifespan from the server's startup to its shutdown."""
        await receive()
        stage = "startup"
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                stage = "shutdown"
                await receive()
        except BaseException:
            await send({"type": f"lifespan.{stage}.failed", "message": format_exc()})
            raise
        await send({"type": "lifespan.shutdown.complete"})


def find_meant_path(path: str, served: Container[str]) -> str | None:
    """Returns the route that a client probably meant by a path that is not served. Returns None if
    there is no such route.

    The client's base URL may lack /v1, have it twice, end with a whole route, or have another
    server's prefix.
    """
    path = path.rstrip("/")
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    candidates = [path, *(path.removeprefix(each) for each in PREFIXES if path.startswith(each))]
    for candidate in candidates:
        while candidate.startswith("/v1/v1/"):
            candidate = candidate.removeprefix("/v1")
        for spelling in (candidate, f"/v1{candidate}", *_endings(candidate)):
            if spelling in served:
                return spelling
    return None


def _endings(path: str) -> list[str]:
    """Returns routes made of the last one or two segments of a path, for clients whose base URL
    already ends with a route, as in /v1/messages/v1/messages."""
    endings: list[str] = []
    steps = path.split("/")
    for count in (2, 1):
        ending = "/".join(steps[-count:])
        endings += [f"/v1/{ending}", f"/{ending}"] if len(steps) > count else []
    return endings
