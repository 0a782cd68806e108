"""Requests that offer another protocol are answered like others, because a server may ignore the
offer. Java's HTTP client and `curl --http2` make one with each first request."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.roles.management import public_app
from tests.plane import Plane, lifespan

OFFERS = {
    "jdk": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "curl": "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "websocket": "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n",
    "tls": "Connection: upgrade\r\nUpgrade: TLS/1.0, HTTP/1.1\r\n",
}
BODY = b'{"model": "bot", "prompt": "Hi"}'


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, path, and body of the request."""
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    about = {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"].decode(),
        "body": body.decode(),
        "names": sorted({name.decode() for name, _ in scope["headers"]}),
    }
    data = json.dumps(about).encode()
    headers = [(b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def sized(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n%s" % (len(body), body)


def chunked(body: bytes) -> bytes:
    half = len(body) // 2
    parts = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (body[:half], body[half:]))
    return b"transfer-encoding: chunked\r\n\r\n%s0\r\n\r\n" % parts


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head, json.loads(await reader.readexactly(length))


@pytest.mark.parametrize("kind", ["data", "admin"])
@pytest.mark.parametrize("cut", ["one", "head", "middle", "bytes"])
@pytest.mark.parametrize("write", [sized, chunked])
@pytest.mark.parametrize("offer", OFFERS)
async def test_an_offer_is_ignored(
    offer: str, write: Callable[[bytes], bytes], cut: str, kind: str
) -> None:
    """In whatever packets the request arrives; and the connection is kept."""
    path = "/v1/completions" if kind == "data" else "/admin/v1/tenants"
    head = f"POST {path}?a=b HTTP/1.1\r\nhost: a\r\n{OFFERS[offer]}".encode()
    data = head + write(BODY)
    end = data.index(b"\r\n\r\n") + 4
    places = {"one": [], "head": [end], "middle": [end - 9, end + 5], "bytes": [*range(len(data))]}
    app: Any = echo
    async with Plane(public_app(app, app)) as plane:  # type: ignore[arg-type]
        port = plane.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            for begin, stop in zip([0, *places[cut]], [*places[cut], len(data)], strict=True):
                writer.write(data[begin:stop])
                await writer.drain()
                await asyncio.sleep(0.01 if cut in ("head", "middle") else 0)
            answered, about = await read_answer(reader)
            assert answered.startswith(b"HTTP/1.1 200 ")
            assert (about["method"], about["path"], about["query"]) == ("POST", path, "a=b")
            assert about["body"] == BODY.decode()
            assert not {"upgrade", "http2-settings"} & set(about["names"])
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        _, about = await read_answer(reader)
        assert (about["method"], about["body"]) == ("GET", "")
        assert await reader.read() == b""
        writer.close()


async def test_requests_behind_an_offer_are_answered_in_turn() -> None:
    offer = f"POST /1 HTTP/1.1\r\nhost: a\r\n{OFFERS['jdk']}".encode() + sized(BODY)
    plain = b"POST /2 HTTP/1.1\r\nhost: a\r\n" + sized(b"{}")
    bodiless = f"GET /3 HTTP/1.1\r\nhost: a\r\n{OFFERS['websocket']}\r\n".encode()
    async with Plane(echo) as plane:
        port = plane.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(offer + plain + bodiless + offer)
        answers = [(await read_answer(reader))[1] for _ in range(4)]
        assert [each["path"] for each in answers] == ["/1", "/2", "/3", "/1"]
        assert [each["body"] for each in answers] == [BODY.decode(), "{}", "", BODY.decode()]
        writer.close()


async def test_an_old_clients_connection_is_closed_after_the_answer() -> None:
    offer = f"POST /1 HTTP/1.0\r\nhost: a\r\n{OFFERS['tls']}".encode() + sized(BODY)
    async with Plane(echo) as plane:
        reader, writer = await asyncio.open_connection("127.0.0.1", plane.port)
        writer.write(offer)
        _, about = await read_answer(reader)
        assert about["body"] == BODY.decode()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_offers_http2() -> None:
    async with Plane(echo) as plane:
        asked = await asyncio.to_thread(
            subprocess.run,
            ["curl", "-sS", "--http2", "-d", BODY.decode(), f"{plane.url}/v1/completions"],
            capture_output=True,
            check=True,
            timeout=20,
        )
    assert json.loads(asked.stdout)["body"] == BODY.decode()
