"""The few known files out of a .tar or .zip, in bounded memory. No path of the archive is used.

Written out rather than taken from `tarfile`, which reads extended headers of any size into memory;
the same of a ZIP's directory is checked before `zipfile` reads it.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from adapters.store import is_disk_full
from admin.errors import Invalid, TooLarge

CHUNK_BYTES = 1 << 20
MAX_MEMBERS = 1024
MAX_DIRECTORY_BYTES = 1 << 20
TAR_BLOCK = 512
ZIP_MAGIC = b"PK\x03\x04"
ZIP_END = struct.Struct("<4s4H2LH")
REGULAR = (b"0", b"\0")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The others' decoders take as much memory as the archive says."""
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
)


def extract(archive: Path, folder: Path, wanted: tuple[str, ...], max_bytes: int) -> None:
    """Copies the regular members whose last path component is wanted into `folder`; skips others.

    Raises Invalid (not a plain tar or zip, damaged, a member twice, not a regular file), TooLarge,
    OSError (the disk is full).
    """
    with archive.open("rb") as file:
        head = file.read(TAR_BLOCK)
        file.seek(0)
        if head.startswith(ZIP_MAGIC):
            _extract_zip(file, folder, wanted, max_bytes)
        elif head[257:262] == b"ustar":
            _extract_tar(file, folder, wanted, max_bytes)
        else:
            raise Invalid("neither an uncompressed .tar nor a .zip", "archive_format")


def _extract_zip(file: IO[bytes], folder: Path, wanted: tuple[str, ...], max_bytes: int) -> None:
    _check_zip_directory(file)
    try:
        with zipfile.ZipFile(file) as members:
            for member in members.infolist():
                name = PurePosixPath(member.filename).name
                if name not in wanted or member.is_dir():
                    continue
                kind = member.external_attr >> 16 & 0o170000
                if kind not in (0, 0o100000) or member.flag_bits & 1:
                    raise Invalid(f"{name} is not a plain file", "archive_member", name)
                if member.compress_type not in ZIP_METHODS:
                    raise Invalid(f"{name} is neither stored nor deflated", "archive_member", name)
                with members.open(member) as source:
                    _copy(source, folder / name, max_bytes)
    except ZIP_ERRORS as error:
        if isinstance(error, OSError) and is_disk_full(error):
            raise
        raise Invalid(f"not a readable .zip: {error}", "archive_format") from error


def _check_zip_directory(file: IO[bytes]) -> None:
    """Members and bytes of the directory as its end record tells, before anything reads it."""
    file.seek(0, 2)
    size = file.tell()
    file.seek(max(0, size - ZIP_END.size - 0xFFFF))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < ZIP_END.size:
        raise Invalid("the .zip has no directory", "archive_format")
    _, _, _, _, num_members, num_bytes, _, _ = ZIP_END.unpack_from(tail, at)
    if num_members > MAX_MEMBERS or num_bytes > MAX_DIRECTORY_BYTES:
        raise Invalid("the .zip has too many members (or is ZIP64)", "archive_format")
    file.seek(0)


def _extract_tar(file: IO[bytes], folder: Path, wanted: tuple[str, ...], max_bytes: int) -> None:
    for name, kind, num_bytes in _tar_members(file):
        start = file.tell()
        if name in wanted and kind != b"5":
            if kind not in REGULAR:
                raise Invalid(f"{name} is not a plain file", "archive_member", name)
            _copy(_Part(file, num_bytes), folder / name, max_bytes)
        file.seek(start + -(-num_bytes // TAR_BLOCK) * TAR_BLOCK)


def _tar_members(file: IO[bytes]) -> Iterator[tuple[str, bytes, int]]:
    """(last path component, type flag, bytes) of each; the data begins where the file stands."""
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
    """The next `num_bytes` of a file."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file = file
        self._left = num_bytes

    def read(self, size: int, /) -> bytes:
        chunk = self._file.read(min(size, self._left))
        if not chunk and self._left:
            raise Invalid("the .tar is cut short", "archive_format")
        self._left -= len(chunk)
        return chunk


def _copy(source: _Part | IO[bytes], target: Path, max_bytes: int) -> None:
    """By what comes out, not by what a header declares."""
    if target.exists():
        raise Invalid(f"{target.name} is in the archive twice", "duplicate_part", target.name)
    copied = 0
    with target.open("xb") as file:
        while chunk := source.read(CHUNK_BYTES):
            copied += len(chunk)
            if copied > max_bytes:
                raise TooLarge(f"{target.name} has more than {max_bytes} bytes")
            file.write(chunk)
