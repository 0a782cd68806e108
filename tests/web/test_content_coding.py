"""Compressed bodies: decoded within the same bounds as others, whatever their chunks."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable

import pytest
import zstandard

from store.errors import Invalid
from tests.web.test_request import Client
from web.content_coding import MAX_ZSTD_WINDOW, PIECE_BYTES, ZSTD_SLICE_BYTES, decoder_of_body
from web.errors import Overloaded, TooLarge, UnsupportedEncoding
from web.held_bytes import BodyBudget

TEXT = b'{"messages": [' + b'{"role": "user", "content": "Hi"}, ' * 20_000 + b"]}"
LIMIT = 2 << 20
BOMB = bytes(64 << 20)


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


def zstd_of_unknown_size(data: bytes) -> bytes:
    coder = zstandard.ZstdCompressor().compressobj()
    return coder.compress(data) + coder.flush()


WRITERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "zstd stream": ("zstd", zstd_of_unknown_size),
}
every_writer = pytest.mark.parametrize(("coding", "write"), WRITERS.values(), ids=WRITERS)


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@every_writer
@pytest.mark.parametrize("size", [1, 1000, 1 << 30])
@pytest.mark.parametrize("data", [b"{}", TEXT[:3000], TEXT], ids=["tiny", "small", "large"])
async def test_a_body_is_decoded(
    coding: str, write: Callable[[bytes], bytes], size: int, data: bytes
) -> None:
    client = Client(cut(write(data), size), coding=coding)
    assert await client.request().read(LIMIT) == data
    assert client.held.num_bytes == len(data)


@every_writer
async def test_a_bomb_is_refused_before_it_is_whole(
    coding: str, write: Callable[[bytes], bytes]
) -> None:
    client = Client(cut(write(BOMB), 65536), coding=coding)
    with pytest.raises(TooLarge):
        await client.request().read(LIMIT)
    assert client.held.num_read < LIMIT + (10 << 20)


@every_writer
async def test_no_piece_of_a_bomb_is_large(coding: str, write: Callable[[bytes], bytes]) -> None:
    decoder = decoder_of_body({"headers": [(b"content-encoding", coding.encode())]})  # type: ignore
    assert decoder is not None
    sizes = [len(piece) for piece in decoder.decode(write(BOMB))]
    assert max(sizes) <= max(PIECE_BYTES, ZSTD_SLICE_BYTES // 4 * (128 << 10))
    assert sum(sizes) == len(BOMB)
    decoder.end()


async def test_decoded_bytes_count_for_the_tenant() -> None:
    budget = BodyBudget(max_bytes=8 * 100_000)
    client = Client([gzip.compress(bytes(200_000))], budget, coding="gzip")
    with pytest.raises(Overloaded, match="this tenant"):
        await client.request().read(LIMIT)


async def test_the_window_of_zstd_counts_and_is_bounded() -> None:
    data = os.urandom(3 << 20) + bytes(1 << 20)
    for window_log, is_taken in ((22, True), (24, False)):
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
        coder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        chunks = cut(coder.compress(data) + coder.flush(), 65536)
        client = Client(chunks, coding="zstd")
        if is_taken:
            assert await client.request().read(8 << 20) == data
            assert client.held.num_bytes == len(data)
            small = Client(chunks, BodyBudget(max_bytes=8 * (2 << 20)), coding="zstd")
            with pytest.raises(Overloaded):
                await small.request().read(8 << 20)
        else:
            with pytest.raises(Invalid, match=f"at most {MAX_ZSTD_WINDOW}"):
                await client.request().read(8 << 20)


@pytest.mark.parametrize(
    ("coding", "named"),
    [("br", "'br'"), ("compress", "'compress'"), ("gzip, gzip", "2 codings"), ("x" * 999, "'xxx")],
)
async def test_other_codings_are_refused_by_name(coding: str, named: str) -> None:
    with pytest.raises(UnsupportedEncoding, match=named) as refusal:
        await Client([b"{}"], coding=coding).request().read(LIMIT)
    assert refusal.value.status == 415 and len(str(refusal.value)) < 200


@every_writer
@pytest.mark.parametrize("kind", ["plain", "cut", "more", "two", "empty"])
async def test_a_wrong_body_is_refused_by_its_coding(
    coding: str, write: Callable[[bytes], bytes], kind: str
) -> None:
    data = write(TEXT)
    bodies = {
        "plain": b'{"model": "tiny"}      ',
        "cut": data[: len(data) // 2],
        "more": data + b"more",
        "two": data + data,
        "empty": b"",
    }
    with pytest.raises(Invalid, match="'content-encoding' names"):
        await Client([bodies[kind]], coding=coding).request().read(LIMIT)


@pytest.mark.parametrize("coding", ["identity", "", "Identity"])
async def test_no_coding(coding: str) -> None:
    assert await Client([b"{}"], coding=coding).request().read(LIMIT) == b"{}"
