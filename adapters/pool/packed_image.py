"""Packed adapter on the host: its factors in the device's layout, and where each of them is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ops.base import PROJECTIONS
from ops.commands import TableRows


@dataclass(frozen=True, slots=True)
class ImageTables:
    """Locations of the factors in an image. Rank 0 means that the adapter does not change the
    projection.

    For L layers and P projections: rank is int32 [L + 1, P]; a_offset and b_offset are int64 [L +
    1, P], in bytes from the start of the image. The last row is for the modules outside of the
    layers. replaced: locations of the adapter's own rows of a table, by table (EMBEDDING or HEAD).
    """

    rank: NDArray[np.int32]
    a_offset: NDArray[np.int64]
    b_offset: NDArray[np.int64]
    replaced: dict[int, TableRows] = field(default_factory=dict[int, TableRows])

    @classmethod
    def empty(cls, num_layers: int, num_projections: int = len(PROJECTIONS)) -> ImageTables:
        size = (num_layers + 1, num_projections)
        return cls(np.zeros(size, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int64))

    def factor_ends(self, num_bytes: int) -> list[int]:
        """Returns the byte positions at which an image may be split, and its end (`num_bytes`)."""
        touched = self.rank > 0
        starts = {*self.a_offset[touched].tolist(), *self.b_offset[touched].tolist()}
        for rows in self.replaced.values():
            starts |= {rows.ids, rows.rows}
        return [*sorted(starts - {0}), num_bytes]


@dataclass(frozen=True, slots=True)
class AdapterImage:
    """Packed adapter on the host. payload: uint8 [num_bytes], in memory. It is not a mapped file,
    because another process could truncate the file and thereby crash this process, and because each
    mapping needs a file descriptor.

    sha256: SHA-256 of the payload, computed when the image was packed.
    """

    digest: str
    tables: ImageTables
    payload: NDArray[np.uint8]
    sha256: bytes

    @classmethod
    def of(cls, digest: str, tables: ImageTables, payload: Tensor) -> AdapterImage:
        """Returns the image of a newly packed adapter, and computes the payload's SHA-256."""
        raw: NDArray[np.uint8] = payload.numpy()
        return cls(digest, tables, raw, hashlib.sha256(raw.data).digest())

    @property
    def num_bytes(self) -> int:
        return len(self.payload)

    @property
    def checksum(self) -> str:
        """SHA-256 (hex) over the tables and the payload's SHA-256."""
        tables = self.tables
        hasher = hashlib.sha256(self.sha256)
        for table in (tables.rank, tables.a_offset, tables.b_offset):
            hasher.update(table.tobytes())
        if tables.replaced:
            hasher.update(msgspec.msgpack.encode(sorted(tables.replaced.items())))
        return hasher.hexdigest()
