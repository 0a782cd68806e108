"""Cache of packed adapter images on local disk. Each image is a file with checksums, which can be
rebuilt from the store.

File: magic, u32 header length, SHA-256 of the header, header (msgpack), zeros to a multiple of 64,
payload. A read checks the payload's CRC-32. The payload's SHA-256 identifies the image. It is
computed only when the image is packed, because it would be the slowest part of a load.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import RLock

import msgspec
import numpy as np

from adapters.format.validator import aligned
from adapters.pool.load_cost import LoadCost
from adapters.pool.packed_image import AdapterImage, ImageTables
from memory.bounded_items import BoundedItems
from ops.commands import TableRows

log = logging.getLogger(__name__)

MAGIC = b"lpximg03"
PREFIX_BYTES = len(MAGIC) + 4 + 32
MAX_HEADER_BYTES = 16 << 20


class ImageCorrupt(Exception):
    """Error for an image file that is damaged or contains another image."""


class ImageHeader(msgspec.Struct, frozen=True):
    """Header of an image file. sha256, crc32: checksums of the payload. rank, a_offset, b_offset:
    little-endian bytes of the arrays of `ImageTables`, which have `num_rows` rows. replaced: see
    `ImageTables`."""

    digest: str
    layout: str
    num_rows: int
    num_bytes: int
    sha256: bytes
    crc32: int
    rank: bytes
    a_offset: bytes
    b_offset: bytes
    replaced: dict[int, TableRows] = {}


class ImageCache:
    """Image files of all layouts, in `<root>/<layout>/<digest>.img`, of at most `max_bytes` bytes
    in total.

    Evicts the images that take the least time to build per byte, weighted by their expected reuse.
    Of images with the same cost, evicts the oldest. Thread-safe.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        expected_reuse: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        self._lock = RLock()
        """Held while files are added, removed or counted."""
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        # Other workers of this machine may share the cache, and may remove files at any time.
        for leftover in root.glob("*/*.tmp"):
            _remove_unless_written(leftover)
        files: list[tuple[os.stat_result, Path]] = []
        for path in root.glob("*/*.img"):
            with suppress(FileNotFoundError):
                files.append((path.stat(), path))
        files.sort(key=lambda item: item[0].st_mtime)
        self._images = BoundedItems[tuple[str, str]](
            max_bytes,
            lambda key: LoadCost().build_s(self._images.size(key)) * expected_reuse(key[1]),
        )
        """Images by (layout, digest), with their sizes in bytes."""
        for status, path in files:
            self._images.put((path.parent.name, path.stem), status.st_size)
        self._make_room(0)

    @property
    def max_bytes(self) -> int:
        return self._images.max_bytes

    @property
    def held(self) -> tuple[int, int]:
        """Number and total bytes of the images."""
        return len(self._images), self._images.num_bytes

    def has(self, layout: str, digest: str) -> bool:
        return (layout, digest) in self._images

    def load(self, layout: str, digest: str) -> AdapterImage | None:
        """Returns the verified image, or None if the cache has no valid one. Removes a file that is
        damaged or unreadable."""
        path = self._path(layout, digest)
        try:
            image = _read(path, digest, layout)
        except FileNotFoundError:
            # Only the cache's record of the file is dropped, because another worker of this machine
            # may have written the file in the meantime.
            with self._lock:
                self._images.drop((layout, digest))
            return None
        except (ImageCorrupt, OSError) as error:
            log.warning("removed a cached image: %s", error)
            self.delete(layout, digest)
            return None
        # An OSError is ignored, because another worker may have removed the file in the meantime,
        # or the disk may be read-only.
        with self._lock, suppress(OSError):
            self._images.put((layout, digest), path.stat().st_size)
            os.utime(path)
        return image

    def save(self, layout: str, image: AdapterImage) -> None:
        """Stores the image, unless it is larger than `max_bytes` or writing it fails."""
        head = _encode_head(image, layout)
        num_bytes = len(head) + image.num_bytes
        with self._lock:
            self.delete(layout, image.digest)
            if num_bytes > self.max_bytes:
                return
            self._make_room(num_bytes)
            try:
                _write(self._path(layout, image.digest), head, image)
            except OSError as error:
                log.warning("caching the image of %s failed: %s", image.digest, error)
                return
            self._images.put((layout, image.digest), num_bytes)

    def delete(self, layout: str, digest: str) -> None:
        """Deletes the image. If the disk fails, the file stays but is no longer used."""
        with self._lock:
            self._images.drop((layout, digest))
            with suppress(OSError):
                self._path(layout, digest).unlink()

    def remove_deleted(self, is_stored: Callable[[str], bool]) -> None:
        """Removes the images of adapters that the store no longer has.

        is_stored: function that returns whether the store has the adapter with this digest. It may
        be slow, and raises OSError if the store does not answer.
        """
        with self._lock:
            keys = list(self._images)
        for layout, digest in keys:
            if not is_stored(digest):
                self.delete(layout, digest)

    def _path(self, layout: str, digest: str) -> Path:
        return self._root / layout / f"{digest}.img"

    def _make_room(self, num_bytes: int) -> None:
        """Evicts images until `num_bytes` more fit."""
        for key in self._images.victims(num_bytes) or ():
            self.delete(*key)


def _write(path: Path, head: bytes, image: AdapterImage) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            # If the file system has no locks, `_remove_unless_written` removes nothing.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(head)
            file.write(image.payload.data)
            file.flush()
            temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _remove_unless_written(temporary: Path) -> None:
    """Removes a temporary file whose writer has died. A running writer holds a lock on its file."""
    with suppress(OSError), temporary.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_size:
            temporary.unlink()


def _encode_head(image: AdapterImage, layout: str) -> bytes:
    header = msgspec.msgpack.encode(
        ImageHeader(
            digest=image.digest,
            layout=layout,
            num_rows=len(image.tables.rank),
            num_bytes=image.num_bytes,
            sha256=image.sha256,
            crc32=zlib.crc32(image.payload.data),
            rank=image.tables.rank.tobytes(),
            a_offset=image.tables.a_offset.tobytes(),
            b_offset=image.tables.b_offset.tobytes(),
            replaced=image.tables.replaced,
        )
    )
    head = MAGIC + len(header).to_bytes(4, "little") + hashlib.sha256(header).digest() + header
    return head + bytes(aligned(len(head)) - len(head))


def _read(path: Path, digest: str, layout: str) -> AdapterImage:
    """Reads and verifies an image. Raises OSError or ImageCorrupt."""
    with path.open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        size = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 4], "little")
        raw = file.read(min(size, MAX_HEADER_BYTES))
        if prefix[:8] != MAGIC or prefix[-32:] != hashlib.sha256(raw).digest():
            raise ImageCorrupt(f"{path.name}: damaged header")
        try:
            header = msgspec.msgpack.decode(raw, type=ImageHeader)
        except msgspec.MsgspecError as error:
            raise ImageCorrupt(f"{path.name}: a header of another shape: {error}") from error
        start = aligned(PREFIX_BYTES + size)
        is_whole = os.fstat(file.fileno()).st_size == start + header.num_bytes
        if (header.digest, header.layout) != (digest, layout) or not is_whole:
            raise ImageCorrupt(f"{path.name}: another image, or cut")
        file.seek(start)
        payload = np.empty(header.num_bytes, np.uint8)
        num_read = file.readinto(payload.data)
    if num_read != len(payload) or zlib.crc32(payload.data) != header.crc32:
        raise ImageCorrupt(f"{path.name}: wrong checksum")
    return AdapterImage(digest, _decode_tables(header), payload, header.sha256)


def _decode_tables(header: ImageHeader) -> ImageTables:
    size = (header.num_rows, -1)
    return ImageTables(
        rank=np.frombuffer(header.rank, np.int32).reshape(size),
        a_offset=np.frombuffer(header.a_offset, np.int64).reshape(size),
        b_offset=np.frombuffer(header.b_offset, np.int64).reshape(size),
        replaced=header.replaced,
    )
