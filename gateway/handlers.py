"""How the routes that matter are declared."""

from __future__ import annotations

from typing import Any, cast

from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Middleware, Receive, Scope, Send

from gateway.errors import ErrorAnswer
from gateway.request import GatewayRequest


class HotRoute(HTTPRouteHandler):
    """Its function takes the request and returns an ASGI application, which raises only before it
    has sent anything. It is called as simply as that, after its guards: what the framework's route
    does for handlers of any kind costs more than authorisation and routing together, and what it
    does for an exception as much as the request did until then."""

    def resolve_middleware(self) -> list[Middleware]:
        return [self._in_place_of]

    def _in_place_of(self, app: ASGIApp) -> ASGIApp:
        handler: Any = cast(Any, self)
        guards = handler.resolve_guards()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            request = GatewayRequest(scope, receive, send)
            try:
                for guard in guards:
                    await guard(request, self)
                response: ASGIApp = await handler.fn(request)
                await response(scope, receive, send)
            except Exception as error:
                await ErrorAnswer(error)(scope, receive, send)

        return answer
