"""The bytes of a spool's files: records one after the other, each behind its length and CRC-32.

A writer that dies leaves at most one torn record, at the end, and nobody was told of that one.
"""

from __future__ import annotations

import struct
import zlib

_HEAD = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 20
"""A longer one is no record of ours."""


def frame(record: bytes) -> bytes:
    """What a file holds of a record, which is not empty."""
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def read_frames(data: bytes) -> tuple[list[bytes], int]:
    """The records up to the first that is torn or spoilt, and the bytes that they take."""
    records: list[bytes] = []
    at = 0
    while record := _record_at(data, at):
        records.append(record)
        at += _HEAD.size + len(record)
    return records, at


def is_torn(rest: bytes) -> bool:
    """Whether what follows the last record that was read is but the beginning of another."""
    if len(rest) >= _HEAD.size:
        length, _ = _HEAD.unpack_from(rest)
        if not len(rest) - _HEAD.size < length <= MAX_RECORD_BYTES:
            return False
    # Behind a length that was spoilt there may be more.
    return not any(_record_at(rest, at) for at in range(_HEAD.size + 1, len(rest)))


def _record_at(data: bytes, at: int) -> bytes:
    """The record that begins there; nothing if it is torn or spoilt, or of zeros, as a file system
    may leave at the end."""
    if at + _HEAD.size > len(data):
        return b""
    length, crc = _HEAD.unpack_from(data, at)
    if length > len(data) - at - _HEAD.size:
        return b""
    record = data[at + _HEAD.size : at + _HEAD.size + length]
    return record if zlib.crc32(record) == crc else b""
