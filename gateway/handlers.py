"""How the routes that matter are declared."""

from __future__ import annotations

from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.handlers import HTTPRouteHandler


class HotRoute(HTTPRouteHandler):
    """Its guards are given the handler itself. The framework gives each a copy, which costs more
    than what a guard does."""

    async def authorize_connection(self, connection: ASGIConnection[Any, Any, Any, Any]) -> None:
        for guard in cast(Any, self).resolve_guards():
            await guard(connection, self)
