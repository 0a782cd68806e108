"""Answers clients while the server waits for its database."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from litestar import Request, Response
from litestar.types import Message, Scope

from admin.http import problems
from loraplex.roles.probes import UNAVAILABLE, make_probes
from loraplex.roles.retrying import retry
from store.errors import DatabaseUnavailable
from store.periodic import in_background
from web import server
from web.http_protocol import Config
from web.request_head import add_request_headers, number_request

T = TypeVar("T")

PATIENCE_S = 1.0
"""Seconds for which clients wait in the listener's queue before they are refused."""


async def until_there(
    attempt: Callable[[], Awaitable[T]],
    listener: socket.socket,
    report: Callable[[str], None],
    tls: ssl.SSLContext | None = None,
) -> T:
    """Returns the result of `attempt`, which is retried while it raises DatabaseUnavailable.

    After `PATIENCE_S` seconds, clients of the listener get 503 until the result is available. Calls
    `report` with the reason. Raises all other errors, such as DatabaseMisconfigured."""
    trying = retry(attempt, lambda reason: report(f"waiting for the database: {reason}"))
    async with in_background(trying) as task:
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if task.done():
            return task.result()
        async with _refusing(listener, tls):
            return await task


async def _unavailable() -> str:
    return UNAVAILABLE


def _refuse(request: Request[Any, Any, Any], _: Exception) -> Response[dict[str, Any]]:
    """Refuses all routes but the probes until the database is available."""
    return problems.to_response(request, DatabaseUnavailable("not there yet"))


async def _number(message: Message, scope: Scope) -> None:
    """Adds the request's id to every answer, as the gateway does."""
    number_request(scope)
    await add_request_headers(message, scope)


class _Server(server.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Installs no signal handlers, because the caller handles signals."""
        yield


@asynccontextmanager
async def serving_beside(config: Config, listener: socket.socket) -> AsyncGenerator[None]:
    """Serves in the background until the end of the block, and then waits for running requests."""
    own = _Server(config)
    task = asyncio.create_task(own.serve(sockets=[listener]))
    try:
        yield
    finally:
        own.should_exit = True
        await task


def _refusing(
    listener: socket.socket, tls: ssl.SSLContext | None
) -> AbstractAsyncContextManager[None]:
    app = make_probes(_unavailable, on_error=_refuse, before_send=[_number])
    # This server closes only a duplicate of the socket. Connections that are still queued then are
    # accepted by the next server.
    return serving_beside(server.make_config(app, drain_s=1, tls=tls), listener.dup())
