"""An ASGI application behind a real server, so that bodies stream and clients can go away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway.requests.services import GatewayRefusals
from web.http_protocol import HEAD_S, KEEP_ALIVE_S
from web.server import Server, make_config


@asynccontextmanager
async def serving(
    app: Any,
    trusted_proxies: Sequence[str] = (),
    keep_alive_s: int = KEEP_ALIVE_S,
    head_s: float = HEAD_S,
    **bounds: Any,
) -> AsyncIterator[str]:
    """The URL of `app` on a free port of this machine, served as the gateway role does it."""
    # Without its number asyncio leaves Nagle's algorithm on, which costs 40 ms a request.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        config = make_config(
            app, drain_s=5, metrics=GatewayRefusals(), trusted_proxies=trusted_proxies, **bounds
        )
        config.head_s = head_s
        config.timeout_keep_alive = keep_alive_s
        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
            assert not task.done()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
