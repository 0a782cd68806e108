"""Defines the format of a write-ahead log segment: records, each preceded by its length and CRC-32.

A writer that crashes leaves at most one incomplete batch of records at the end of its segment. None
of the requests in this batch has been answered completely. A file that was truncated later looks
the same, so incomplete records are reported instead of dropped.
"""

from __future__ import annotations

import struct
import zlib

_HEAD = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 20
"""Maximum size of a record. A longer one is treated as damaged."""


def frame(record: bytes) -> bytes:
    """Returns the bytes that are written to a segment for a record. The record must not be
    empty."""
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def read_frames(data: bytes) -> tuple[list[bytes], int]:
    """Returns the records before the first incomplete or damaged one, and the size in bytes of
    their frames."""
    records: list[bytes] = []
    at = 0
    while record := _record_at(data, at):
        records.append(record)
        at += _HEAD.size + len(record)
    return records, at


def split_damaged(data: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the intact records of a file, and the damaged fragments between and after them.

    After a damaged record, searches byte by byte for the next intact one. Zeros, which a file
    system may leave at the end, do not count as a fragment.
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
    """Returns the record that begins at position `at`. Returns empty bytes if the record is
    incomplete, damaged, or consists of zeros, which a file system may leave at the end."""
    if at + _HEAD.size > len(data):
        return b""
    length, crc = _HEAD.unpack_from(data, at)
    if length > min(len(data) - at - _HEAD.size, MAX_RECORD_BYTES):
        return b""
    record = data[at + _HEAD.size : at + _HEAD.size + length]
    return record if zlib.crc32(record) == crc else b""
