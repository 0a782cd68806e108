"""`python -m benchmarks.http_floors raw|asgi|litestar FD BODY`: runs a server that answers every
request with BODY, as a lower bound for the gateway's costs. The kinds are a raw socket, a bare ASGI
application on uvicorn, and Litestar on uvicorn."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
import uvloop
from litestar import Litestar, Request, post

from web.server import make_config, make_server

PATH = "/v1/chat/completions"
HEADERS = [
    (b"content-type", b"application/json"),
    (b"loraplex-worker", b"frames"),
    (b"x-request-id", b"req_00000000000000000000000000000000"),
]


class Raw(asyncio.Protocol):
    """Server that treats each piece of received data as a whole request. Its rate is the maximum of
    the load generator."""

    def __init__(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body)
        self._answer = head + b"".join(b"%s: %s\r\n" % each for each in HEADERS) + b"\r\n" + body

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)


class Canned:
    """ASGI application that sends a fixed answer."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._headers = [*HEADERS, (b"content-length", b"%d" % len(body))]

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": False})


def bare_app(canned: Canned) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await canned(scope, receive, send)

    return app


def litestar_app(canned: Canned) -> Litestar:
    @post(PATH, status_code=200)
    async def create_chat_completion(request: Request[Any, Any, Any]) -> Canned:
        await request.body()
        return canned

    return Litestar([create_chat_completion], openapi_config=None, logging_config=None)


async def main() -> None:
    kind, fd, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
    listener = socket.socket(fileno=fd)
    canned = Canned(body)
    match kind:
        case "raw":
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: Raw(body), sock=listener)
            await server.serve_forever()
        case "asgi":
            config = make_config(bare_app(canned))
            config.lifespan = "off"
            await uvicorn.Server(config).serve(sockets=[listener])
        case _:
            await make_server(litestar_app(canned)).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(main())
