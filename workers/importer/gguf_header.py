"""Checks the structure of a GGUF file before the library `gguf` reads it, in bounded time.

The library trusts the counts in the file: of a number that is too large it makes as many Python
objects, and it reads beyond the end of the file without an error.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from workers.importer.canonical import ImportRefused

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22
"""Maximum number of elements of all arrays together. Vocabularies have up to 0.3 million tokens."""
MAX_DEPTH = 2
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_DIMENSIONS = 4
ALIGNMENT_KEY = "general.alignment"

_SIZES = {
    **dict.fromkeys((GGUFValueType.UINT8, GGUFValueType.INT8, GGUFValueType.BOOL), 1),
    **dict.fromkeys((GGUFValueType.UINT16, GGUFValueType.INT16), 2),
    **dict.fromkeys((GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.FLOAT32), 4),
    **dict.fromkeys((GGUFValueType.UINT64, GGUFValueType.INT64, GGUFValueType.FLOAT64), 8),
}


def check_gguf(path: Path) -> None:
    """Raises ImportRefused, naming the place, unless the header of a GGUF file is whole, its counts
    are within the bounds, and every tensor is within the file and overlaps no other one."""
    if path.stat().st_size < 24:
        raise ImportRefused(f"{path.name} is no GGUF file: it has {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data, path.name).check()


class _Header:
    """Reader of a GGUF header that stops at its end. Every read is checked against the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._name = name
        self._offset = 0
        self._num_items = 0
        self._alignment = 32

    def check(self) -> None:
        if self._take(4) != b"GGUF":
            self._refuse("it does not begin with GGUF")
        if (version := self._number("<I")) not in (2, 3):
            self._refuse(f"version {version} is not read; allowed: 2, 3 (little-endian)")
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_keys = self._count("metadata keys", MAX_KEYS)
        keys: set[bytes] = set()
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_NAME_BYTES)
            if key in keys:
                self._refuse(f"metadata key {_shown(key)} is there twice")
            keys.add(key)
            self._check_value(key)
        tensors = [self._read_tensor() for _ in range(num_tensors)]
        start = -(-self._offset // self._alignment) * self._alignment
        self._check_places(tensors, start)

    def _check_value(self, key: bytes) -> None:
        kind = self._kind(key)
        if key == ALIGNMENT_KEY.encode():
            if kind is not GGUFValueType.UINT32:
                self._refuse(f"{ALIGNMENT_KEY} is no 32-bit number")
            (self._alignment,) = struct.unpack_from("<I", self._data, self._offset)
            if not 0 < self._alignment <= 1 << 20 or self._alignment & (self._alignment - 1):
                self._refuse(f"{ALIGNMENT_KEY} = {self._alignment}; allowed: a power of two")
        self._skip_value(key, kind, 0)

    def _skip_value(self, key: bytes, kind: GGUFValueType, depth: int) -> None:
        if kind is GGUFValueType.STRING:
            self._string(_shown(key), MAX_STRING_BYTES)
        elif kind is not GGUFValueType.ARRAY:
            self._take(_SIZES[kind])
        elif depth == MAX_DEPTH:
            self._refuse(f"{_shown(key)} has arrays in arrays deeper than {MAX_DEPTH}")
        else:
            inner, length = self._kind(key), self._number("<Q")
            self._num_items += length
            if self._num_items > MAX_ITEMS:
                self._refuse(
                    f"{_shown(key)} has an array of {length} elements; allowed: {MAX_ITEMS} in all"
                    " arrays"
                )
            if inner in _SIZES:
                self._take(_SIZES[inner] * length)
            else:
                for _ in range(length):
                    self._skip_value(key, inner, depth + 1)

    def _read_tensor(self) -> tuple[int, int, bytes]:
        """Returns offset, number of bytes and name of a tensor."""
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._refuse(
                f"tensor {_shown(name)} has {num_dimensions} dimensions; allowed: 1 to"
                f" {MAX_DIMENSIONS}"
            )
        shape = [self._number("<Q") for _ in range(num_dimensions)]
        kind = self._number("<I")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            self._refuse(f"tensor {_shown(name)} has the unknown type {kind}")
        if 0 in shape or shape[0] % block:
            self._refuse(f"tensor {_shown(name)} has shape {shape}, and its blocks {block} numbers")
        offset = self._number("<Q")
        if offset % self._alignment:
            self._refuse(f"tensor {_shown(name)} is not aligned to {self._alignment} bytes")
        return offset, math.prod(shape) // block * block_bytes, name

    def _check_places(self, tensors: list[tuple[int, int, bytes]], start: int) -> None:
        ordered = sorted(tensors)
        for offset, num_bytes, name in ordered:
            if start + offset + num_bytes > len(self._data):
                self._refuse(
                    f"tensor {_shown(name)} ends at byte {start + offset + num_bytes}, and the file"
                    f" has {len(self._data)} bytes: it is cut short"
                )
        for (offset, num_bytes, name), (following, _, other) in pairwise(ordered):
            if offset + num_bytes > following:
                self._refuse(f"tensors {_shown(name)} and {_shown(other)} overlap")

    def _kind(self, key: bytes) -> GGUFValueType:
        kind = self._number("<I")
        try:
            return GGUFValueType(kind)
        except ValueError:
            self._refuse(f"{_shown(key)} has the unknown type {kind}")

    def _count(self, of: str, limit: int) -> int:
        count = self._number("<Q")
        if count > limit:
            self._refuse(f"it has {count} {of}; allowed: {limit}")
        return count

    def _string(self, of: str, limit: int) -> bytes:
        length = self._number("<Q")
        if length > limit:
            self._refuse(f"{of} has {length} bytes; allowed: {limit}")
        return self._take(length)

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return number

    def _take(self, num_bytes: int) -> bytes:
        end = self._offset + num_bytes
        if end > len(self._data):
            self._refuse(f"the header is cut short at byte {len(self._data)}")
        taken = self._data[self._offset : end]
        self._offset = end
        return taken

    def _refuse(self, why: str) -> NoReturn:
        raise ImportRefused(f"{self._name} is no GGUF file that is read: {why}")


def _shown(name: bytes) -> str:
    return repr(name[:64].decode("utf-8", "replace"))
