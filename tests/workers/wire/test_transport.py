"""One contract for every transport, and what only Unix sockets and TCP have."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapters.reference import AdapterRef
from workers.wire.frames import MAX_FRAME_BYTES, PROTOCOL_VERSION, Abort, Hello, Prefetch, StepFrame
from workers.wire.protocol import Generate, SamplingParams, SequenceOutput
from workers.wire.transport.base import (
    ConnectionLost,
    FrameTooLarge,
    InsecureTransport,
    MalformedFrame,
    MutualTLS,
    PeerRefused,
    ProtocolMismatch,
    Security,
    TransportError,
)
from workers.wire.transport.registry import connect, exchange_hello, listen
from workers.wire.transport.stream import WorkerConnection
from workers.wire.transport.tls import ServerContext

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
INSECURE = Security(insecure=True)


@dataclass
class Wire:
    """A listener that hands out its ends of connections."""

    address: str = ""
    accepted: asyncio.Queue[WorkerConnection] = field(default_factory=asyncio.Queue)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def accept(self, connection: WorkerConnection) -> None:
        self.accepted.put_nowait(connection)
        await self.done.wait()
        connection.abort()
        await connection.close()

    async def open_raw(self) -> Streams:
        scheme, _, rest = self.address.partition(":")
        if scheme == "unix":
            return await asyncio.open_unix_connection(rest)
        return await asyncio.open_connection(*rest.removeprefix("//").split(":"))


@pytest.fixture(params=["unix", "tcp"])
async def wire(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wire]:
    addresses = {"unix": f"unix:{tmp_path}/socket", "tcp": "tcp://127.0.0.1:0"}
    wire = Wire()
    listener = await listen(addresses[request.param], wire.accept, INSECURE)
    wire.address = listener.address
    yield wire
    await listener.close()
    wire.done.set()
    with pytest.raises(OSError):
        await connect(wire.address, INSECURE)


def prompt_of(num_tokens: int) -> Generate:
    params = SamplingParams(max_tokens=1, seed=0)
    return Generate(1, "r", "m", [70_000] * num_tokens, params, cache_domain="d")


async def test_messages_arrive_in_order_both_ways(wire: Wire) -> None:
    ours = await connect(wire.address, INSECURE)
    theirs = await wire.accepted.get()
    for number in range(300):
        ours.send(Abort(number))
        theirs.send(StepFrame([SequenceOutput(number, [number])]))
    for number in range(300):
        assert await theirs.receive() == Abort(number)
        assert await ours.receive() == StepFrame([SequenceOutput(number, [number])])
    await ours.close()
    assert await theirs.receive() is None


async def test_a_frame_larger_than_every_buffer_arrives(wire: Wire) -> None:
    ours = await connect(wire.address, INSECURE)
    theirs = await wire.accepted.get()
    large = prompt_of(3_000_000)
    ours.send(large)
    ours.send(Abort(1))
    assert ours.num_unsent_bytes > 1 << 20
    assert await theirs.receive() == large
    assert await theirs.receive() == Abort(1)
    assert ours.num_unsent_bytes == 0
    await ours.close()


async def test_a_message_over_the_limit_is_refused_and_the_connection_stays(wire: Wire) -> None:
    ours = await connect(wire.address, INSECURE)
    theirs = await wire.accepted.get()
    with pytest.raises(FrameTooLarge, match=str(MAX_FRAME_BYTES)):
        ours.send(prompt_of(MAX_FRAME_BYTES // 5 + 1))
    ours.send(Abort(7))
    assert await theirs.receive() == Abort(7)
    await ours.close()


async def test_an_announced_length_over_the_limit_closes_before_any_of_it_is_read(
    wire: Wire,
) -> None:
    reader, writer = await wire.open_raw()
    theirs = await wire.accepted.get()
    writer.write((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge, match=str(MAX_FRAME_BYTES + 1)):
        await theirs.receive()
    await assert_closed(reader, writer)
    with pytest.raises(ConnectionLost):
        theirs.send(StepFrame([]))


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa3rm!",
        b"\x81\xa4type\xa5abort",
        b"\x82\xa4type\xa5abort\xa2id\xa1x",
        b"\x82\xa4type\xa5abort\xa2id\x01\x00",
        b"\x81\xa4type\xa4step",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_garbage_is_a_named_error_and_closes(wire: Wire, garbage: bytes) -> None:
    reader, writer = await wire.open_raw()
    theirs = await wire.accepted.get()
    writer.write(len(garbage).to_bytes(4, "big") + garbage)
    with pytest.raises(MalformedFrame):
        await theirs.receive()
    await assert_closed(reader, writer)


@pytest.mark.parametrize("part", [b"\x00\x00", b"\x00\x00\x00\x05abc"])
async def test_a_stream_that_ends_inside_a_frame_is_a_named_error(wire: Wire, part: bytes) -> None:
    _, writer = await wire.open_raw()
    theirs = await wire.accepted.get()
    writer.write(part)
    writer.write_eof()
    with pytest.raises(MalformedFrame, match="middle"):
        await theirs.receive()
    writer.close()
    await writer.wait_closed()


async def test_a_side_that_ended_its_sending_still_receives(wire: Wire) -> None:
    reader, writer = await wire.open_raw()
    theirs = await wire.accepted.get()
    writer.write_eof()
    assert await theirs.receive() is None
    theirs.send(StepFrame([]))
    length = int.from_bytes(await reader.readexactly(4), "big")
    assert b"step" in await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()


async def test_hello_goes_both_ways_and_a_mismatch_is_refused_by_name(wire: Wire) -> None:
    ours = await connect(wire.address, INSECURE)
    theirs = await wire.accepted.get()
    mine, yours = Hello(PROTOCOL_VERSION, "gateway"), Hello(PROTOCOL_VERSION, "worker")
    both = await asyncio.gather(exchange_hello(ours, mine), exchange_hello(theirs, yours))
    assert both == [yours, mine]
    ours.send(Hello(PROTOCOL_VERSION + 1, "newer"))
    with pytest.raises(ProtocolMismatch, match=f"newer speaks protocol {PROTOCOL_VERSION + 1}"):
        await exchange_hello(theirs, yours)
    ours.send(Abort(1))
    with pytest.raises(ProtocolMismatch, match="Abort"):
        await exchange_hello(theirs, yours)
    await ours.close()
    with pytest.raises(ConnectionLost):
        await exchange_hello(theirs, yours)


async def assert_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def ignore(connection: WorkerConnection) -> None:
    await connection.receive()
    await connection.close()


async def test_a_unix_socket_is_private_replaces_a_stale_one_and_goes_when_closed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    listener = await listen(f"unix:{path}", ignore)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await (await connect(f"unix:{path}")).close()
    await listener.close()
    assert not path.exists()


async def test_a_unix_socket_that_another_serves_stays_its_own(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    listener = await listen(address, ignore)
    with pytest.raises(OSError, match="in use"):
        await listen(address, ignore)
    await (await connect(address)).close()
    await listener.close()


async def test_a_file_in_the_way_of_a_unix_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(OSError):
        await listen(f"unix:{path}", ignore)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("use", [connect, lambda address: listen(address, ignore)])
async def test_tcp_without_tls_must_be_asked_for(use: Callable[[str], Awaitable[object]]) -> None:
    with pytest.raises(InsecureTransport):
        await use("tcp://127.0.0.1:9")


@pytest.mark.parametrize("address", ["unix:relative", "tcp://host", "http://host:1", "", "unix"])
async def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"scheme|is not"):
        await connect(address, INSECURE)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificate(folder: Path, name: str, subject: str) -> MutualTLS:
    """Of the authority in the folder, for one subject alternative name."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(
        *(folder, "req", *key, "-subj", f"/CN={name}"),
        *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
    )
    (folder / "ext").write_text(f"subjectAltName={subject}")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    paths = ["-in", f"{name}.csr", "-extfile", "ext", "-out", f"{name}.pem"]
    openssl(folder, "x509", "-req", *signed, *paths)
    return MutualTLS(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")


def make_authority(folder: Path) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    folder.mkdir()
    openssl(folder, "req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(folder, "req", *key[:5], "-subj", "/CN=x", "-keyout", "x.key", "-out", "x.csr")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl(folder, "x509", "-req", "-in", "x.csr", *signed, "-extfile", "ext", "-out", "x.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_a_certificate_that_could_not_be_read_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files do not change again: only the reason passes, such as too many open files."""
    make_authority(tmp_path / "ours")
    ours = tmp_path / "ours"
    tls = MutualTLS(ours / "x.pem", ours / "x.key", ours / "ca.pem")
    context = ServerContext(tls)
    first = context.current()
    os.utime(tls.certificate, (1, 1))
    with monkeypatch.context() as patched:

        def fail(_: MutualTLS) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        patched.setattr(MutualTLS, "server_context", fail)
        assert context.current() is first
    renewed = context.current()
    assert renewed is not first and context.current() is renewed


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_tcp_with_mutual_tls_admits_only_those_the_authority_signed(tmp_path: Path) -> None:
    for name in ("ours", "strangers"):
        make_authority(tmp_path / name)
    ours, strangers = (
        MutualTLS(folder / "x.pem", folder / "x.key", tmp_path / "ours/ca.pem")
        for folder in (tmp_path / "ours", tmp_path / "strangers")
    )
    received: asyncio.Queue[object] = asyncio.Queue()

    async def accept(connection: WorkerConnection) -> None:
        received.put_nowait(await connection.receive())
        await connection.close()

    security = Security(tls=ours, gateways=("*",))
    listener = await listen("tcp://127.0.0.1:0", accept, security)
    connection = await connect(listener.address, Security(tls=ours))
    connection.send(Prefetch("m", AdapterRef("sha256:1")))
    assert isinstance(await received.get(), Prefetch)
    await connection.close()
    for refused in (Security(tls=strangers), INSECURE):
        with contextlib.suppress(TransportError, OSError):
            stranger = await connect(listener.address, refused)
            stranger.send(Abort(1))
            assert await stranger.receive() is None
            await stranger.close()
    assert received.empty()
    await listener.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_only_certificates_with_a_gateway_s_name_are_let_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another worker's certificate, of the same authority, drains and generates nothing; both sides
    know why, and the worker says it once. New files count for the next connection."""
    folder = tmp_path / "ca"
    make_authority(folder)
    worker = make_certificate(folder, "worker", "IP:127.0.0.1,DNS:worker-1")
    gateway = make_certificate(folder, "gateway", "DNS:gw-1.example")
    received: asyncio.Queue[object] = asyncio.Queue()

    async def accept(connection: WorkerConnection) -> None:
        received.put_nowait(await connection.receive())
        await connection.close()

    security = Security(tls=worker, gateways=("DNS:gw-*.example",))
    listener = await listen("tcp://127.0.0.1:0", accept, security)
    for _ in range(2):
        impostor = await connect(listener.address, Security(tls=worker))
        with pytest.raises(PeerRefused, match="DNS:worker-1: not among transport_gateways"):
            await exchange_hello(impostor, Hello(PROTOCOL_VERSION, "impostor"))
        await impostor.close()
    assert received.empty()
    assert caplog.text.count("not among transport_gateways") == 1
    with pytest.raises(PeerRefused, match="not among transport_workers"):
        await connect(listener.address, Security(tls=gateway, workers=("DNS:other",)))

    connection = await connect(listener.address, Security(tls=gateway, workers=("DNS:worker-*",)))
    connection.send(Abort(1))
    assert await received.get() == Abort(1)
    await connection.close()

    for name in ("key", "pem"):
        (folder / f"worker.{name}").unlink()
    make_certificate(folder, "worker", "DNS:elsewhere")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for '127\.0\.0\.1'"):
        await connect(listener.address, Security(tls=gateway))
    await listener.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_without_names_no_certificate_is_let_in(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    make_authority(folder)
    ours = MutualTLS(folder / "x.pem", folder / "x.key", folder / "ca.pem")
    listener = await listen("tcp://127.0.0.1:0", ignore, Security(tls=ours))
    connection = await connect(listener.address, Security(tls=ours))
    with pytest.raises(PeerRefused, match="transport_gateways"):
        await exchange_hello(connection, Hello(PROTOCOL_VERSION, "gateway"))
    await connection.close()
    await listener.close()
