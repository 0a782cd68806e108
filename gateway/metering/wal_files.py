"""Files of the write-ahead log. Calls may wait for the disk, and are made on the log's thread.

<root>/lock                    locked while owners' folders are created, taken over or removed
<root>/<owner>/lock            locked as long as the owner's process runs
<root>/<owner>/check           written to check that the disk accepts writes
<root>/<owner>/0000000001      segments, in order; removed when loaded
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path

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


CHECK = "check"
CHECK_BYTES = 4096
LOCK = "lock"
SET_ASIDE = "set-aside"


class WalTaken(Exception):
    """Error for an owner whose folder another process has locked."""


class WalFiles:
    """Segments of one owner (a process), and segments taken over from owners that have ended."""

    def __init__(self, root: Path, owner: str, segment_bytes: int) -> None:
        self.num_bytes = 0
        """Bytes of all segments that are not removed yet."""
        self._root = root
        self._folder = root / owner
        self._segment_bytes = segment_bytes
        self._locks: dict[Path, int] = {}
        """File descriptors of the locks on the owner's folder and on folders taken over."""
        self._sealed: dict[Path, int] = {}
        """Size in bytes of each sealed segment, in the order in which they are loaded."""
        self._number = 0
        self._path = self._folder
        self._file = -1
        self._size = 0

    def open(self) -> None:
        """Opens the owner's folder and a new segment. Raises OSError or WalTaken."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._settled():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self._take(self._folder):
                raise WalTaken(f"another process writes to {self._folder}")
        names = [path.name for path in self._sealed]
        self._number = max((int(name) for name in names), default=0)
        self._begin()
        self.adopt()

    def write(self, records: Sequence[bytes]) -> None:
        """Appends the records to the current segment and syncs it. After an OSError, the next write
        overwrites the failed one."""
        frames = b"".join(map(frame, records))
        if self._size >= self._segment_bytes:
            self._roll()
        done = 0
        while done < len(frames):
            done += os.pwrite(self._file, frames[done:], self._size + done)
        os.fdatasync(self._file)
        self._size += done
        self.num_bytes += done

    def check(self) -> None:
        """Writes and syncs a small file next to the segments. Raises OSError if this fails, because
        records could then not be written either."""
        with (self._folder / CHECK).open("wb") as file:
            file.write(bytes(CHECK_BYTES))
            file.flush()
            os.fdatasync(file.fileno())

    def seal(self) -> list[Path]:
        """Returns all segments with records, oldest first. New records go to a new segment."""
        self.adopt()
        if self._size:
            # If the disk is full, no new segment can be created, but the sealed segments can still
            # be loaded.
            with contextlib.suppress(OSError):
                self._roll()
        return list(self._sealed)

    def num_bytes_of(self, segment: Path) -> int:
        """Returns the size in bytes that a sealed segment had when it was written or taken over."""
        return self._sealed.get(segment, 0)

    def remove(self, segment: Path) -> None:
        """Deletes a loaded segment."""
        segment.unlink(missing_ok=True)
        self._forget(segment)

    def set_aside(self, segment: Path, data: bytes) -> None:
        """Writes records that cannot be loaded (`data`) to a file for operators, and deletes their
        segment. If this raises OSError, the segment is unchanged."""
        # The hash makes the name unique, because segment numbers start again once all segments are
        # loaded.
        name = f"{segment.parent.name}-{segment.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        path = self._root / f"{name}.{SET_ASIDE}"
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._root)
        self.remove(segment)

    def adopt(self) -> None:
        """Takes over the segments of owners that have ended. An owner has ended if its folder is
        not locked."""
        with self._settled():
            for folder in sorted(self._root.iterdir()):
                if folder.is_dir() and folder not in self._locks:
                    self._take(folder)

    def emptied(self) -> list[str]:
        """Returns the owners whose folders were taken over and whose segments are all removed."""
        full = {path.parent for path in self._sealed}
        return [each.name for each in self._locks if each not in full and each != self._folder]

    def drop(self, owner: str) -> None:
        """Removes the empty folder of an owner that `emptied` has returned."""
        with self._settled():
            self._drop_if_empty(self._root / owner)

    def close(self) -> None:
        """Closes the current segment and releases the locks. The next process loads the segments
        that are left."""
        os.close(self._file)
        if self._size:
            self._sealed[self._path] = self._size
        with self._settled():
            for folder in list(self._locks):
                self._drop_if_empty(folder)
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _take(self, folder: Path) -> bool:
        """Locks a folder, and adds its segments to the sealed ones. Returns False if another
        process holds the lock."""
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._locks[folder] = lock
        for path in sorted(folder.iterdir()):
            if path.name.isdecimal():
                self._sealed[path] = path.stat().st_size
                self.num_bytes += self._sealed[path]
        return True

    def _drop_if_empty(self, folder: Path) -> None:
        if not any(path.parent == folder for path in self._sealed):
            shutil.rmtree(folder, ignore_errors=True)
            os.close(self._locks.pop(folder))

    def _roll(self) -> None:
        full, size, file = self._path, self._size, self._file
        self._begin()
        os.close(file)
        self._sealed[full] = size

    def _begin(self) -> None:
        """Creates a new segment, and syncs its name to disk before anything is written to it."""
        path = self._folder / f"{self._number + 1:010}"
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            _sync_folder(self._folder)
        except OSError:
            os.close(file)
            raise
        self._path, self._file, self._size = path, file, 0
        self._number += 1

    def _forget(self, segment: Path) -> None:
        self.num_bytes -= self._sealed.pop(segment, 0)

    @contextlib.contextmanager
    def _settled(self) -> Generator[None, None, None]:
        """Holds the lock of the root folder. Owners' folders are created, taken over and removed
        only under this lock."""
        lock = os.open(self._root / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
