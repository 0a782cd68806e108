"""HTTP server of every plane: uvicorn with uvloop and httptools on an existing socket."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvicorn
from litestar.types import ASGIApp

from web.edge import Draining
from web.held_bytes import SLOW_CLIENT_S, AnswerBudget, BodyBudget
from web.http_protocol import KEEP_ALIVE_S, Config, Connections, HttpProtocol
from web.refusals import RefusalMetrics, Refusals

BACKLOG = 2048
ACCEPTED_AT_ONCE = 8
"""Number of listeners on the same socket. libuv accepts one connection per listener in each turn of
its loop, so with one listener, connections would queue while turns are long."""
DRAIN_LOOK_S = 0.05
"""Seconds between checks for requests in progress during a shutdown."""
STUCK_CLIENT_MS = 30_000
"""Milliseconds after which the kernel drops a connection whose peer accepts no data. An orderly
close would wait for the peer forever."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a listening socket. Port 0 finds a free port, and `::` listens on all addresses of
    IPv6 and IPv4. If `shared` is set, several processes may listen on the port."""
    listener = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=BACKLOG,
        reuse_port=shared,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_CLIENT_MS)
    return listener


def make_config(
    app: ASGIApp,
    *,
    drain_s: float = 30.0,
    trusted_proxies: Sequence[str] = (),
    max_connections: int | None = None,
    max_connections_per_address: int | None = None,
    bodies: BodyBudget | None = None,
    answers: AnswerBudget | None = None,
    slow_client_s: float = SLOW_CLIENT_S,
    metrics: RefusalMetrics | None = None,
    draining: Draining | None = None,
    tls: ssl.SSLContext | None = None,
) -> Config:
    """Returns a server configuration. At shutdown, requests in progress have `drain_s` seconds to
    end.

    `trusted_proxies` are addresses or networks of proxies whose `X-Forwarded-For` names the client.
    By default there are none, and the client is the peer. If there is one, all connections may come
    from the proxy's address, so the limit per address does not apply. `max_connections` and
    `max_connections_per_address` are passed to `Connections`.

    `bodies` and `answers` limit the memory of request bodies and answers, `metrics` counts
    refusals, and `draining` is set when a server shuts down. Servers of one process may share all
    four. A client that does not read for `slow_client_s` seconds is disconnected.
    """
    return Config(
        app,
        connections=Connections(
            max_connections, 0 if trusted_proxies else max_connections_per_address
        ),
        bodies=bodies or BodyBudget(),
        answers=answers or AnswerBudget(),
        slow_client_s=slow_client_s,
        refusals=Refusals(metrics),
        draining=draining or Draining(),
        http=HttpProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        # Clients' errors are not logged by uvicorn, because `Refusals` records each of them once.
        log_level=logging.ERROR,
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s),
        ssl_context_factory=None if tls is None else partial(_given, tls),
    )


def _given(tls: ssl.SSLContext, _config: uvicorn.Config, _default: object) -> ssl.SSLContext:
    return tls


class Server(uvicorn.Server):
    """Server that also ends when a background task of the application fails, because it would
    otherwise serve stale data forever. A supervisor restarts the process."""

    config: Config

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        protocol = partial(HttpProtocol, self.config, self.server_state, self.lifespan.state)
        for listener in (sockets or []) * (ACCEPTED_AT_ONCE - 1):
            sock = listener.dup()
            self.servers.append(await loop.create_server(protocol, sock=sock, ssl=self.config.ssl))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses new requests until the requests in progress have ended, then closes the listener.
        If it closed the listener at once while another process shares it, new clients would get no
        answer."""
        config, loop = self.config, asyncio.get_running_loop()
        ends_at = loop.time() + (config.timeout_graceful_shutdown or 0)
        config.draining.is_on = True
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while config.edge.num_open and not self.force_exit and loop.time() < ends_at:
            await asyncio.sleep(DRAIN_LOOK_S)
        config.timeout_graceful_shutdown = max(0, math.ceil(ends_at - loop.time()))
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or getattr(self.lifespan, "error_occurred", False)


def make_server(
    app: ASGIApp, *, drain_s: float = 30.0, metrics: RefusalMetrics | None = None, **bounds: Any
) -> Server:
    """Returns a server. Run it with `serve(sockets=[bind(...)])`. `bounds` are further arguments of
    `make_config`."""
    return Server(make_config(app, drain_s=drain_s, metrics=metrics, **bounds))
