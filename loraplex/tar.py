"""Tar archive of an adapter folder. It is never written to disk, and any part of it can be read."""

from __future__ import annotations

import tarfile
from pathlib import Path

from loraplex.errors import ApiFailure


class Tar:
    """Tar archive of files that do not change while it is sent."""

    def __init__(self, files: list[Path]) -> None:
        self._parts: list[tuple[int, bytes | Path]] = []
        """Offset of each part in the archive, and the bytes or file that begin there."""
        self.size = 0
        for file in files:
            member = tarfile.TarInfo(file.name)
            member.size = file.stat().st_size
            self._add(member.tobuf(tarfile.GNU_FORMAT))
            self._add(file)
            self._add(bytes(-member.size % tarfile.BLOCKSIZE))
        self._add(bytes(2 * tarfile.BLOCKSIZE))

    def _add(self, part: bytes | Path) -> None:
        self._parts.append((self.size, part))
        self.size += len(part) if isinstance(part, bytes) else part.stat().st_size

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Returns up to `num_bytes` from `offset`. Raises ApiFailure if a file has shrunk."""
        end = min(offset + num_bytes, self.size)
        ends = [start for start, _ in self._parts[1:]] + [self.size]
        read = b""
        for (start, part), part_end in zip(self._parts, ends, strict=True):
            low, high = max(offset, start), min(end, part_end)
            if low < high:
                read += _read(part, low - start, high - low)
        if len(read) != end - offset:
            raise ApiFailure("the files have changed while they were uploaded")
        return read


def _read(part: bytes | Path, offset: int, num_bytes: int) -> bytes:
    if isinstance(part, bytes):
        return part[offset : offset + num_bytes]
    with part.open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)
