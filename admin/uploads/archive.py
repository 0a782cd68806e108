"""Extracts an adapter's files from a .tar or .zip, with a limit on their bytes.

Only the last component of a path in the archive is used. The size that the archive declares for a
file is checked before the file is written, and its bytes are counted again while they are written.
The .tar reader is our own, because `tarfile` reads extended headers of any size into memory. The
size of a ZIP's directory is checked before `zipfile` reads it.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from adapters.format.validator import CONFIG_NAME, MAX_CONFIG_BYTES, PICKLE_NAMES, WEIGHTS_NAME
from adapters.store.folder import is_disk_full
from store.errors import Invalid
from web.errors import TooLarge

KNOWN_FILES = (CONFIG_NAME, WEIGHTS_NAME, *PICKLE_NAMES)
"""Names of the files that are extracted. Pickles are included so that they can be refused by
name."""
CHUNK_BYTES = 1 << 20
MAX_MEMBERS = 1024
MAX_DIRECTORY_BYTES = 1 << 20
TAR_BLOCK = 512
ZIP_MAGIC = b"PK\x03\x04"
ZIP_END_MAGIC = b"PK\x05\x06"
ZIP_END = struct.Struct("<4s4H2LH")
ZIP64_LOCATOR_MAGIC = b"PK\x06\x07"
ZIP64_LOCATOR_BYTES = 20
ZIP64_END_MAGIC = b"PK\x06\x06"
ZIP64_END = struct.Struct("<4sQ2H2L4Q")
REGULAR = (b"0", b"\0")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Supported compression methods. Other decoders take as much memory as the archive demands."""
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
)


class StagingFolder(msgspec.Struct, frozen=True):
    """Folder that receives the files of one upload, and limits on their bytes."""

    path: Path
    max_bytes: int
    """Maximum bytes of all files together."""
    check_room: Callable[[int], None]
    """Function that is called with the number of bytes about to be written. Raises OSError (ENOSPC)
    if they would use the disk's reserve."""


def max_file_bytes(name: str, max_bytes: int) -> int:
    """Returns the maximum bytes of the file `name`. `max_bytes` limits all files together."""
    return min(max_bytes, MAX_CONFIG_BYTES) if name == CONFIG_NAME else max_bytes


def extract(archive: Path, target: StagingFolder) -> None:
    """Extracts the known files from an archive and skips all others. A file is recognised by the
    last component of its path.

    A pickle's bytes are not copied. An empty file of the same name takes its place, and the
    validator refuses it. Raises TooLarge, OSError if the disk is full, and Invalid if the archive
    is damaged or not a plain tar or zip, or if a known file occurs twice or is not a regular file.
    """
    with archive.open("rb") as file:
        head = file.read(TAR_BLOCK)
        file.seek(0)
        if head.startswith(ZIP_MAGIC):
            _extract_zip(file, _Writer(target))
        elif head[257:262] == b"ustar":
            _extract_tar(file, _Writer(target))
        else:
            raise Invalid("neither an uncompressed .tar nor a .zip", "archive_format")


class _Writer:
    """Writes the known files of one archive and counts their bytes."""

    def __init__(self, target: StagingFolder) -> None:
        self._target = target
        self._bytes_left = target.max_bytes
        self._names: set[str] = set()

    def declare(self, name: str, num_bytes: int) -> None:
        """Reserves the bytes that a member declares. Raises Invalid if a member of this name was
        declared before, and TooLarge if this member or all members together are too large."""
        if name in self._names:
            raise Invalid(f"{name} is in the archive twice", "duplicate_part", name)
        self._names.add(name)
        if name in PICKLE_NAMES:
            return
        limit = max_file_bytes(name, self._target.max_bytes)
        if num_bytes > limit:
            raise TooLarge(f"{name} has {num_bytes} bytes of at most {limit}", param=name)
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise TooLarge(f"the files have more than {self._target.max_bytes} bytes")

    def check_room(self) -> None:
        """Raises OSError unless the disk has room for all declared bytes."""
        self._target.check_room(self._target.max_bytes - self._bytes_left)

    def copy(self, source: _Part | IO[bytes], name: str, num_bytes: int) -> None:
        """Writes a declared member. Raises Invalid if its size differs from the declared one."""
        copied = 0
        with (self._target.path / name).open("xb") as file:
            while name not in PICKLE_NAMES and (chunk := source.read(CHUNK_BYTES)):
                copied += len(chunk)
                if copied > num_bytes:
                    break
                self._target.check_room(len(chunk))
                file.write(chunk)
        if name not in PICKLE_NAMES and copied != num_bytes:
            raise Invalid(
                f"{name} does not have the {num_bytes} bytes that the archive declares",
                "archive_member",
                name,
            )


def _extract_zip(file: IO[bytes], writer: _Writer) -> None:
    num_members = _count_zip_members(file)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) != num_members:
                raise Invalid(
                    "the .zip's directory has another length than it says", "archive_format"
                )
            wanted = [found for member in members if (found := _known_member(member))]
            for name, member in wanted:
                writer.declare(name, member.file_size)
            writer.check_room()
            for name, member in wanted:
                with archive.open(member) as source:
                    writer.copy(source, name, member.file_size)
    except ZIP_ERRORS as error:
        if isinstance(error, OSError) and is_disk_full(error):
            raise
        raise Invalid(f"not a readable .zip: {error}", "archive_format") from error


def _known_member(member: zipfile.ZipInfo) -> tuple[str, zipfile.ZipInfo] | None:
    """Returns the name of the known file that a member contains, and the member. Returns None for
    other members. Raises Invalid if the member is not a plain file."""
    name = PurePosixPath(member.filename).name
    if name not in KNOWN_FILES or member.is_dir():
        return None
    kind = member.external_attr >> 16 & 0o170000
    if kind not in (0, 0o100000) or member.flag_bits & 1:
        raise Invalid(f"{name} is not a plain file", "archive_member", name)
    if member.compress_type not in ZIP_METHODS:
        raise Invalid(f"{name} is neither stored nor deflated", "archive_member", name)
    return name, member


def _count_zip_members(file: IO[bytes]) -> int:
    """Returns the number of members according to the end record, or to the ZIP64 end record if
    there is one. Must be called before `zipfile` reads the directory. Raises Invalid if the
    directory has too many members or bytes."""
    size = file.seek(0, 2)
    tail_at = max(0, size - ZIP_END.size - 0xFFFF)
    file.seek(tail_at)
    tail = file.read()
    at = tail.rfind(ZIP_END_MAGIC)
    if at < 0 or len(tail) - at < ZIP_END.size:
        raise Invalid("the .zip has no directory", "archive_format")
    _, _, _, _, num_members, num_bytes, _, _ = ZIP_END.unpack_from(tail, at)
    locator_at = tail_at + at - ZIP64_LOCATOR_BYTES
    if locator_at >= 0:
        file.seek(locator_at)
        # `zipfile` uses a ZIP64 record regardless of what the plain end record contains.
        if file.read(len(ZIP64_LOCATOR_MAGIC)) == ZIP64_LOCATOR_MAGIC:
            num_members, num_bytes = _read_zip64_end(file, locator_at)
    if num_members > MAX_MEMBERS or num_bytes > MAX_DIRECTORY_BYTES:
        raise Invalid("the .zip has too many members", "archive_format")
    file.seek(0)
    return num_members


def _read_zip64_end(file: IO[bytes], locator_at: int) -> tuple[int, int]:
    """Returns the number of members, and the bytes of the directory. Reads the record right before
    the locator, as `zipfile` does."""
    file.seek(max(0, locator_at - ZIP64_END.size))
    record = file.read(ZIP64_END.size)
    if len(record) < ZIP64_END.size or not record.startswith(ZIP64_END_MAGIC):
        raise Invalid("the .zip's ZIP64 record is not where it should be", "archive_format")
    *_, num_members, num_bytes, _ = ZIP64_END.unpack(record)
    return num_members, num_bytes


def _extract_tar(file: IO[bytes], writer: _Writer) -> None:
    for name, kind, num_bytes in _tar_members(file):
        start = file.tell()
        if name in KNOWN_FILES and kind != b"5":
            if kind not in REGULAR:
                raise Invalid(f"{name} is not a plain file", "archive_member", name)
            writer.declare(name, num_bytes)
            writer.copy(_Part(file, num_bytes), name, num_bytes)
        file.seek(start + -(-num_bytes // TAR_BLOCK) * TAR_BLOCK)


def _tar_members(file: IO[bytes]) -> Iterator[tuple[str, bytes, int]]:
    """Yields the last path component, the type flag and the number of bytes of each member. Leaves
    the file at the member's data, from which the caller must seek to the next member."""
    for _ in range(MAX_MEMBERS):
        block = file.read(TAR_BLOCK)
        if len(block) < TAR_BLOCK:
            raise Invalid("the .tar is cut short", "archive_format")
        if not any(block):
            return
        stored, summed = _octal(block[148:156]), sum(block[:148]) + sum(block[156:]) + 8 * 32
        if stored != summed:
            raise Invalid("the .tar is damaged", "archive_format")
        path = block[:100].rstrip(b"\0").decode("utf-8", "replace")
        yield PurePosixPath(path).name, block[156:157], _octal(block[124:136])
    raise Invalid("the .tar has too many members", "archive_format")


def _octal(field: bytes) -> int:
    text = field.strip(b" \0")
    if not text.isdigit():
        raise Invalid("the .tar has a number that is not octal", "archive_format")
    try:
        return int(text, 8)
    except ValueError as error:
        raise Invalid("the .tar has a number that is not octal", "archive_format") from error


class _Part:
    """Reader of the next `num_bytes` of a file."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file = file
        self._left = num_bytes

    def read(self, size: int, /) -> bytes:
        chunk = self._file.read(min(size, self._left))
        if not chunk and self._left:
            raise Invalid("the .tar is cut short", "archive_format")
        self._left -= len(chunk)
        return chunk
