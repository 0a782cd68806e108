"""A server that is started while its database is away: says so until it is there."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from litestar import Request, Response
from litestar.types import Message, Scope

from admin.errors import DatabaseUnavailable
from admin.http import problems
from gateway.http import server
from gateway.http.http_protocol import Config
from loraplex.roles.probes import make_probes
from loraplex.roles.retrying import retry

T = TypeVar("T")

PATIENCE_S = 1.0
"""Callers wait in the queue of the listener for so long, and are refused after that."""


async def until_there(
    attempt: Callable[[], Awaitable[T]],
    listener: socket.socket,
    report: Callable[[str], None],
    tls: ssl.SSLContext | None = None,
) -> T:
    """What `attempt` returns, tried again for as long as it raises DatabaseUnavailable.

    Meanwhile clients of the listener get 503, and `report` is called with the reason. What waiting
    does not mend is raised: DatabaseMisconfigured, and whatever else it raises."""
    trying = asyncio.create_task(
        retry(attempt, lambda reason: report(f"waiting for the database: {reason}"))
    )
    try:
        await asyncio.wait({trying}, timeout=PATIENCE_S)
        if trying.done():
            return trying.result()
        async with _refusing(listener, tls):
            return await trying
    finally:
        trying.cancel()


async def _never() -> bool:
    return False


def _refuse(request: Request[Any, Any, Any], _: Exception) -> Response[dict[str, Any]]:
    """Whatever else is asked for: none of it is here yet."""
    return problems.to_response(request, DatabaseUnavailable("not there yet"))


async def _number(message: Message, _: Scope) -> None:
    """Every answer has an id, as the gateway's own have."""
    if message["type"] == "http.response.start":
        request_id = f"req_{os.urandom(16).hex()}".encode()
        message["headers"] = [*message["headers"], (b"x-request-id", request_id)]


class _Server(server.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to the caller."""
        yield


@asynccontextmanager
async def serving_beside(config: Config, listener: socket.socket) -> AsyncGenerator[None]:
    """Serves beside the caller, and finishes what runs on leaving."""
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
    app = make_probes(_never, on_error=_refuse, before_send=[_number])
    # It closes what it is given; connections queued by then go to the server that comes next.
    return serving_beside(server.make_config(app, drain_s=1, tls=tls), listener.dup())
