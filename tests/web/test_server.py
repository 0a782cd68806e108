"""Sockets of both families, and large bodies with and without TLS."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loraplex.roles.test_management import make_certificate
from tests.plane import Plane, lifespan
from web.server import Server, bind, make_config
from workers.wire.transport import tls

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")


async def show_client(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the client's address, and with the scheme that a trusted proxy named."""
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    data = json.dumps([scope["client"][0], scope["scheme"], scope["method"]]).encode()
    headers = [(b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_all_addresses_are_those_of_both_families(host: str) -> None:
    """And a trusted proxy is recognised by its IPv4 address."""
    with bind("::", 0) as listener:
        config = make_config(show_client, trusted_proxies=["127.0.0.1", "::1"], drain_s=1)
        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        port = listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        async with httpx.AsyncClient() as client:
            assert (await client.get(url)).json() == [host, "http", "GET"]
            named = {"x-forwarded-for": "192.0.2.7", "x-forwarded-proto": "https"}
            assert (await client.get(url, headers=named)).json() == ["192.0.2.7", "https", "GET"]
            head = await client.head(url)
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) > 0
        server.should_exit = True
        await task


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_so_are_those_of_a_worker(host: str) -> None:
    with tls.bind("::", 0) as listener:
        address = host, listener.getsockname()[1]
        socket.create_connection(address, timeout=5).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_address_is_of_one_family(host: str) -> None:
    with bind(host, 0) as listener:
        socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()
        other = {"127.0.0.1": "::1", "::1": "127.0.0.1"}[host]
        with pytest.raises(OSError):
            socket.create_connection((other, listener.getsockname()[1]), timeout=5)


BODY = bytes(range(256)) * (20 << 12)
"""20 MiB."""


async def send_much(scope: Any, receive: Any, send: Any) -> None:
    """Answers with one large body."""
    if scope["type"] == "lifespan":
        return await show_client(scope, receive, send)
    headers = [(b"content-length", b"%d" % len(BODY))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY, "more_body": False})
    return None


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_large_body_is_read_whole_or_its_client_is_cut(
    is_tls: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server_side = client_side = None
    if is_tls:
        certificate, key = make_certificate(tmp_path)
        server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_side.load_cert_chain(certificate, key)
        client_side = ssl.create_default_context(cafile=str(certificate))
    async with Plane(send_much, tls=server_side, slow_client_s=0.5, drain_s=1) as plane:
        reader, writer = await asyncio.open_connection("127.0.0.1", plane.port, ssl=client_side)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(BODY)) == BODY
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(20):
            while plane.server.config.edge.num_open:
                await asyncio.sleep(0.05)
        assert [each.__dict__.get("reason") for each in caplog.records] == ["slow_reader"]
        writer.transport.abort()
