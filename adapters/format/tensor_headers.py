"""Reader of the safetensors header, which checks it against the file size before any data is read.
Torch-free.

Format: https://huggingface.co/docs/safetensors/index#format (u64 length, JSON header, data).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import BinaryIO

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.strict_json import decode_object

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 8192
MAX_NAME_LENGTH = 256
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

PICKLE_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header entry of one tensor. data_offsets: begin and end of its bytes, counted from the end of
    the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorHeader(msgspec.Struct, frozen=True):
    """Checked header of a file. tensors: entries by name, in the order of their bytes, which cover
    the data without gaps. data_start: offset of the data in the file."""

    tensors: dict[str, TensorEntry]
    data_start: int


def read_header(file: BinaryIO, file_bytes: int) -> TensorHeader:
    """Reads the header at the start of `file` and leaves the file's position at the first byte of
    data.

    Raises AdapterRejected with a code adapter.file.*, adapter.header.*, adapter.tensor.* or
    adapter.unsupported.* (a pickle or GGUF file).
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    # The length of a header may begin with the bytes of a pickle, but a pickle never begins with
    # the length of a header.
    if prefix.startswith(PICKLE_MAGICS) and length > MAX_HEADER_BYTES:
        raise AdapterRejected(
            "adapter.unsupported.pickle",
            "adapter_model.safetensors",
            "a pickle or zip archive",
            ["safetensors"],
        )
    if prefix.startswith(b"GGUF"):
        raise AdapterRejected("adapter.unsupported.gguf", "adapter_model.safetensors", "GGUF")
    if prefix == b"version ":
        raise AdapterRejected(
            "adapter.file.git_lfs", "adapter_model.safetensors", "a Git LFS pointer"
        )
    if len(prefix) < 8:
        raise AdapterRejected("adapter.file.truncated", "adapter_model.safetensors", file_bytes)
    if length > MAX_HEADER_BYTES:
        raise AdapterRejected("adapter.header.too_large", "header", length, MAX_HEADER_BYTES)
    if 8 + length > file_bytes:
        raise AdapterRejected("adapter.file.truncated", "header", file_bytes, 8 + length)
    raw = decode_object(file.read(length), "adapter.header.invalid", "header")
    _check_metadata(raw.pop("__metadata__", {}))
    if len(raw) > MAX_TENSORS:
        raise AdapterRejected("adapter.header.too_many_tensors", "header", len(raw), MAX_TENSORS)
    tensors = {name: _parse_entry(name, value) for name, value in raw.items()}
    return TensorHeader(_lay_out(tensors, file_bytes - 8 - length), 8 + length)


def _check_metadata(value: object) -> None:
    try:
        # MLX writes null if there is no metadata, which safetensors' own reader accepts.
        msgspec.convert(value, dict[str, str] | None)
    except msgspec.ValidationError as error:
        raise AdapterRejected("adapter.header.invalid", "__metadata__", str(error)) from None


def _parse_entry(name: str, value: object) -> TensorEntry:
    if len(name) > MAX_NAME_LENGTH:
        raise AdapterRejected("adapter.tensor.name", name, len(name), MAX_NAME_LENGTH)
    try:
        entry = msgspec.convert(value, TensorEntry)
    except msgspec.ValidationError as error:
        raise AdapterRejected("adapter.header.invalid", name, str(error)) from None
    if entry.dtype not in ITEM_BYTES:
        raise AdapterRejected("adapter.tensor.dtype", name, entry.dtype, list(ITEM_BYTES))
    if len(entry.shape) > 8 or any(not 0 <= size < 1 << 32 for size in entry.shape):
        raise AdapterRejected("adapter.tensor.shape", name, entry.shape)
    if 0 in entry.shape:
        raise AdapterRejected(
            "adapter.tensor.empty", name, list(entry.shape), "at least one number"
        )
    begin, end = entry.data_offsets
    expected = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if begin < 0 or end - begin != expected:
        raise AdapterRejected("adapter.header.offsets", name, entry.data_offsets, expected)
    return entry


def _lay_out(tensors: dict[str, TensorEntry], data_bytes: int) -> dict[str, TensorEntry]:
    """Returns the tensors in the order of their bytes. Raises AdapterRejected unless the tensors'
    bytes cover [0, data_bytes) exactly, without overlap."""
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].data_offsets))
    bounds = [(0, 0), *(entry.data_offsets for entry in ordered.values())]
    for name, (before, after) in zip(ordered, pairwise(bounds), strict=True):
        if after[0] != before[1]:
            kind = "overlap" if after[0] < before[1] else "gap"
            raise AdapterRejected(f"adapter.header.{kind}", name, after[0], before[1])
    used = bounds[-1][1]
    if used > data_bytes:
        raise AdapterRejected("adapter.file.truncated", "data", data_bytes, used)
    if used < data_bytes:
        raise AdapterRejected("adapter.file.trailing_bytes", "data", data_bytes, used)
    return ordered
