"""The bytes of a segment of the write-ahead log: records, each behind its length and CRC-32.

A writer that dies leaves at most one torn batch of records, at the end, none of whose requests was
answered. A file that was cut later ends in the same way, so no fragment is dropped.
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


def split_damaged(data: bytes) -> tuple[list[bytes], list[bytes]]:
    """The whole records of a file, and the fragments between and behind them that are none.

    Behind a spoilt record the search goes on byte by byte for the next whole one. Zeros, as a file
    system may leave at the end, are no fragment.
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
    """The record that begins there; nothing if it is torn or spoilt, or of zeros, as a file system
    may leave at the end."""
    if at + _HEAD.size > len(data):
        return b""
    length, crc = _HEAD.unpack_from(data, at)
    if length > min(len(data) - at - _HEAD.size, MAX_RECORD_BYTES):
        return b""
    record = data[at + _HEAD.size : at + _HEAD.size + length]
    return record if zlib.crc32(record) == crc else b""
