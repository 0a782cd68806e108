"""The worker's log says why a TLS peer was refused, in a bounded number of lines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.workers.wire.test_transport import make_authority, make_certificate, openssl
from workers.wire.transport.base import MutualTLS, Security
from workers.wire.transport.refusals import (
    MAX_LINES,
    MAX_REMEMBERED,
    REPEAT_S,
    WINDOW_S,
    RefusalLog,
)
from workers.wire.transport.registry import listen
from workers.wire.transport.stream import WorkerConnection

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl"),
    pytest.mark.asyncio(loop_scope="module"),
]


EMPTY_FRAME = bytes(4)


@dataclass
class Port:
    """A worker's TLS port, and certificates of those that knock."""

    number: int
    authority: Path
    strangers_authority: Path
    gateway: MutualTLS
    stranger: MutualTLS
    nameless: MutualTLS

    def context(self, tls: MutualTLS | None) -> ssl.SSLContext:
        """A client that trusts the worker, and shows this certificate."""
        context = ssl.create_default_context(cafile=self.authority)
        if tls is not None:
            context.load_cert_chain(tls.certificate, tls.key)
        return context

    async def knock(self, context: ssl.SSLContext, name: str = "127.0.0.1") -> None:
        """Connects, sends an empty frame and reads until the other side closes."""
        await self._say(EMPTY_FRAME, ssl=context, server_hostname=name)

    async def say(self, data: bytes) -> None:
        """Connects without TLS, sends the bytes and reads until the other side closes."""
        await self._say(data)

    async def _say(self, data: bytes, **options: Any) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.number, **options)
            try:
                writer.write(data)
                await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Port]:
    folder, strangers = (tmp_path_factory.mktemp("tls") / name for name in ("ours", "strangers"))
    make_authority(folder)
    make_authority(strangers)
    worker = make_certificate(folder, "worker", "IP:127.0.0.1")

    async def accept(connection: WorkerConnection) -> None:
        await connection.receive()
        await connection.close()

    security = Security(tls=worker, gateways=("DNS:gw-*",))
    listener = await listen("tcp://127.0.0.1:0", accept, security)
    yield Port(
        int(listener.address.rpartition(":")[2]),
        folder / "ca.pem",
        strangers / "ca.pem",
        make_certificate(folder, "gateway", "DNS:gw-1"),
        make_certificate(strangers, "stranger", "DNS:gw-1"),
        make_certificate(folder, "nameless", "DNS:elsewhere"),
    )
    await listener.close()


async def line_of(caplog: pytest.LogCaptureFixture, pattern: str) -> str:
    """The line of the log that matches, when it is there."""
    async with asyncio.timeout(60):
        while True:
            for record in caplog.records:
                if re.search(pattern, record.getMessage()):
                    return record.getMessage()
            await asyncio.sleep(0.01)


async def test_a_certificate_of_another_authority(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    await port.knock(port.context(port.stranger))
    line = await line_of(caplog, "not signed by the authority in transport_authority")
    assert "the gateway at 127.0.0.1 is refused: no TLS connection: " in line


async def test_a_certificate_that_has_expired(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    folder, own = port.authority.parent, port.gateway
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "-1"]
    openssl(folder, "x509", "-req", "-in", "gateway.csr", *signed, "-out", "expired.pem")
    expired = MutualTLS(folder / "expired.pem", own.key, port.authority)
    await port.knock(port.context(expired))
    await line_of(caplog, "its certificate has expired")


async def test_no_certificate(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    await port.knock(port.context(None))
    await line_of(caplog, "it has shown no certificate")


async def test_a_certificate_with_another_name(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    await port.knock(port.context(port.nameless))
    await line_of(caplog, "its certificate is for DNS:elsewhere: not among transport_gateways")


async def test_an_older_tls(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    context = port.context(port.gateway)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    await port.knock(context)
    await line_of(caplog, r"it speaks no TLS 1\.3")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        struct.pack(">I", 16) + b"\x83" * 16,
        b"SSH-2.0-client\r\n",
    ],
    ids=["http", "proxy", "frame", "ssh"],
)
async def test_plain_text(
    port: Port, caplog: pytest.LogCaptureFixture, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.wire.transport.refusals.REPEAT_S", 0.0)
    await port.say(data)
    await line_of(caplog, "it speaks plain text, and this port speaks TLS")


async def test_a_gateway_that_refuses_this_worker(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenSSL's own client says why before it closes, and asyncio's does not."""
    at = f"127.0.0.1:{port.number}"
    command = ["openssl", "s_client", "-connect", at, "-verify_return_error"]
    command += ["-CAfile", str(port.strangers_authority)]
    await asyncio.to_thread(
        subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    await line_of(caplog, r"it does not accept this worker's certificate .*alert unknown ca")
    await port.knock(port.context(port.gateway), name="elsewhere")
    await line_of(caplog, "it closed the connection during the handshake")


async def test_neither_keys_nor_certificates_are_logged(
    port: Port, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.wire.transport.refusals.REPEAT_S", 0.0)
    await port.knock(port.context(port.stranger))
    await port.say(b"POST / HTTP/1.1\r\nauthorization: Bearer lpx-secret\r\n\r\n")
    await line_of(caplog, "plain text")
    assert "lpx-secret" not in caplog.text
    assert "PRIVATE" not in caplog.text and "BEGIN" not in caplog.text


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


async def test_the_same_refusal_of_a_peer_is_logged_once_until_it_is_let_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    refusals = RefusalLog(lambda: now)
    for _ in range(5):
        for reason in ("expired", "plain text"):
            refusals.refuse("10.0.0.1", reason)
    assert len(lines(caplog)) == 2
    refusals.accept("10.0.0.2")
    refusals.refuse("10.0.0.1", "expired")
    assert not lines(caplog)
    refusals.accept("10.0.0.1")
    refusals.refuse("10.0.0.1", "expired")
    assert len(lines(caplog)) == 1
    now += REPEAT_S
    refusals.refuse("10.0.0.1", "expired")
    assert len(lines(caplog)) == 1


async def test_any_number_of_peers_logs_a_bounded_number_of_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    refusals = RefusalLog(lambda: now)
    for number in range(10 * MAX_REMEMBERED):
        refusals.refuse(f"10.0.{number // 256}.{number % 256}", "expired")
    assert len(lines(caplog)) == MAX_LINES
    now += WINDOW_S
    refusals.refuse("10.1.0.1", "expired")
    dropped = 10 * MAX_REMEMBERED - MAX_LINES
    assert lines(caplog) == [
        f"{dropped} more refusals of gateways were not logged",
        "the gateway at 10.1.0.1 is refused: expired",
    ]
