"""Format of a write-ahead log segment: records, each preceded by its length and CRC-32.

A writer that dies leaves at most one torn batch of records at the end, and has answered none of its
requests. A file that was truncated later looks the same, so that no fragment is dropped.
"""

from __future__ import annotations

import struct
import zlib

_HEAD = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 20
"""Longer records are invalid."""


def frame(record: bytes) -> bytes:
    """Returns the bytes that a file contains for a record, which must not be empty."""
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def read_frames(data: bytes) -> tuple[list[bytes], int]:
    """Returns the records before the first torn or damaged one, and their size in bytes."""
    records: list[bytes] = []
    at = 0
    while record := _record_at(data, at):
        records.append(record)
        at += _HEAD.size + len(record)
    return records, at


def split_damaged(data: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the intact records of a file, and the damaged fragments between and after them.

    After a damaged record, searches byte by byte for the next intact one. Zeros, which a file
    system may leave at the end, are not a fragment.
    """
    records, at = read_frames(data)
    fragments: list[bytes] = []
    start = at
    num_bytes = len(data.rstrip(b"\0"))
    while at < num_bytes:
        record = _record_at(data, at)
        if not record:
            at += 1
            continue
        fragments.append(data[start:at])
        more, num_read = read_frames(data[at:])
        records += more
        start = at = at + num_read
    fragments.append(data[start:])
    return records, [fragment for fragment in fragments if fragment.strip(b"\0")]


def _record_at(data: bytes, at: int) -> bytes:
    """Returns the record that begins at `at`. Returns an empty one if it is torn, damaged or zeros,
    which a file system may leave at the end."""
    if at + _HEAD.size > len(data):
        return b""
    length, crc = _HEAD.unpack_from(data, at)
    if length > min(len(data) - at - _HEAD.size, MAX_RECORD_BYTES):
        return b""
    record = data[at + _HEAD.size : at + _HEAD.size + length]
    return record if zlib.crc32(record) == crc else b""
