"""Decodes compressed request bodies in bounded pieces."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from litestar.types import Scope

from store.errors import Invalid
from web.errors import UnsupportedEncoding
from web.request_head import find_headers

CODINGS = ("gzip", "deflate", "zstd")
"""Codings of request bodies that are decoded."""
PIECE_BYTES = 64 << 10
"""Maximum bytes of a decoded piece of gzip and deflate."""
ZSTD_SLICE_BYTES = 256
"""Bytes of zstd that are decoded at a time. A block of 4 bytes may yield 128 KiB, so a slice yields
at most 8 MiB."""
MAX_ZSTD_WINDOW = 8 << 20
"""Maximum bytes of the window of a zstd frame, which a decoder keeps in memory (RFC 9659)."""
ZSTD_HEADER_BYTES = 18
"""Maximum bytes of the header of a zstd frame."""


class Decoder(ABC):
    """Decoder of one body."""

    num_state_bytes = 0
    """Bytes of memory that the decoder keeps between two chunks, if they are many."""

    def __init__(self, coding: str) -> None:
        self.coding = coding

    @abstractmethod
    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the decoded bytes of a chunk in pieces. Raises Invalid."""

    @abstractmethod
    def end(self) -> None:
        """Raises Invalid if the body is incomplete."""

    def _invalid(self, reason: str) -> Invalid:
        return Invalid(
            f"The body is not valid {self.coding}, which 'content-encoding' names: {reason}.",
            param="content-encoding",
        )


class _Zlib(Decoder):
    def decode(self, chunk: bytes) -> Iterator[bytes]:
        if not hasattr(self, "_inflate"):
            self._inflate = zlib.decompressobj(_window_bits(self.coding, chunk))
        piece = b""
        while chunk or len(piece) == PIECE_BYTES:
            if self._inflate.eof:
                if chunk:
                    raise self._invalid("there are bytes after its end")
                return
            try:
                piece = self._inflate.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise self._invalid(str(error)) from None
            chunk = self._inflate.unconsumed_tail or self._inflate.unused_data
            yield piece

    def end(self) -> None:
        if not (hasattr(self, "_inflate") and self._inflate.eof):
            raise self._invalid("it is incomplete")


def _window_bits(coding: str, begin: bytes) -> int:
    """Returns zlib's parameter for the coding. A body of `deflate` has zlib's format, or none, as
    some clients send it."""
    if coding == "gzip":
        return 16 + zlib.MAX_WBITS
    is_zlib = begin[0] & 0x0F == 8 and (len(begin) < 2 or (begin[0] << 8 | begin[1]) % 31 == 0)
    return zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS


class _Zstd(Decoder):
    def __init__(self, coding: str) -> None:
        super().__init__(coding)
        # Imported here, because most processes never need it.
        import zstandard

        self._module = zstandard
        self._begin = b""
        self._frame = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj()

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        if not self.num_state_bytes:
            self._begin += chunk
            chunk = self._read_header()
        yield from self._decode(chunk)

    def _read_header(self) -> bytes:
        """Returns what was received so far if it contains the header, or empty bytes."""
        begin = self._begin
        try:
            window = self._module.get_frame_parameters(begin).window_size
        except self._module.ZstdError as error:
            if len(begin) < ZSTD_HEADER_BYTES:
                return b""
            raise self._invalid(str(error)) from None
        if window > MAX_ZSTD_WINDOW:
            raise self._invalid(
                f"its window has {window} bytes, and at most {MAX_ZSTD_WINDOW} are taken"
            )
        self.num_state_bytes, self._begin = max(1, window), b""
        return begin

    def _decode(self, chunk: bytes) -> Iterator[bytes]:
        for begin in range(0, len(chunk), ZSTD_SLICE_BYTES):
            if self._frame.eof:
                raise self._invalid("there are bytes after its end")
            try:
                yield self._frame.decompress(chunk[begin : begin + ZSTD_SLICE_BYTES])
            except self._module.ZstdError as error:
                raise self._invalid(str(error)) from None
        if self._frame.unused_data:
            raise self._invalid("there are bytes after its end")

    def end(self) -> None:
        if not self._frame.eof:
            raise self._invalid("it is incomplete")


def decoder_of_body(scope: Scope) -> Decoder | None:
    """Returns a new decoder for the body of a request, or None if it is not compressed. Raises
    UnsupportedEncoding."""
    given = [
        each.strip().lower()
        for header in find_headers(scope, b"content-encoding")
        for each in header.split(",")
    ]
    codings = [each.removeprefix("x-") for each in given if each not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1:
        raise UnsupportedEncoding(
            f"The body has {len(codings)} codings in 'content-encoding'. Use one of "
            f"{', '.join(CODINGS)}."
        )
    match codings[0]:
        case "gzip" | "deflate":
            return _Zlib(codings[0])
        case "zstd":
            return _Zstd(codings[0])
        case other:
            raise UnsupportedEncoding(
                f"Unsupported 'content-encoding': '{other[:64]}'. Use {', '.join(CODINGS)}."
            )


def check_not_compressed(scope: Scope) -> None:
    """Raises UnsupportedEncoding if the body of an upload is compressed as a whole."""
    for header in find_headers(scope, b"content-encoding"):
        if header.strip().lower() not in ("", "identity"):
            raise UnsupportedEncoding(
                f"Uploads take no 'content-encoding'; yours is '{header[:64]}'. Send the archive "
                "itself."
            )
