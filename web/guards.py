"""Guards, which decide who may call a route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

HttpConnection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[HttpConnection, BaseRouteHandler], Awaitable[None]]

INCORRECT = "Incorrect API key provided."


async def public(_connection: HttpConnection, _handler: BaseRouteHandler) -> None:
    """Allows requests without a key."""
