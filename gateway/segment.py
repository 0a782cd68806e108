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
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        record = data[at + _HEAD.size : at + _HEAD.size + length]
        # Zeros, as a file system may leave at the end, would be an empty record with its CRC.
        is_whole = 0 < length <= MAX_RECORD_BYTES and len(record) == length
        if not is_whole or zlib.crc32(record) != crc:
            break
        records.append(record)
        at += _HEAD.size + length
    return records, at
