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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import msgspec

from adapters.format.other_files import name_unused
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
NO_FILES = (b"5", b"x", b"g", b"L", b"K")
"""Type flags of folders, extended headers and long names."""
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


def extract(archive: Path, target: StagingFolder) -> list[str]:
    """Extracts the known files from an archive. A file is recognised by the last component of its
    path. Returns sentences that name the files beside them, which are not extracted.

    A pickle's bytes are not copied. An empty file of the same name takes its place, and the
    validator refuses or names it. Raises TooLarge, OSError if the disk is full, and Invalid if the
    archive is damaged or not a plain tar or zip, if it has several adapters, or if a known file
    occurs twice or is not a regular file.
    """
    with archive.open("rb") as file:
        head = file.read(TAR_BLOCK)
        file.seek(0)
        if head.startswith(ZIP_MAGIC):
            return _extract_zip(file, _Writer(target))
        if head[257:262] == b"ustar":
            return _extract_tar(file, _Writer(target))
        raise Invalid("neither an uncompressed .tar nor a .zip", "archive_format")


class _Chosen(NamedTuple):
    """Files of an archive that form one adapter. folder: folder that contains them."""

    paths: set[PurePosixPath]
    folder: PurePosixPath

    def name_others(self, paths: list[PurePosixPath]) -> list[str]:
        """Returns sentences that name the other files and folders in the adapter's folder."""
        others = self._first_parts(path for path in paths if path not in self.paths)
        inside = self._first_parts(self.paths)
        return name_unused(others, inside.__contains__)

    def _first_parts(self, paths: Iterable[PurePosixPath]) -> set[str]:
        """Returns the names in the adapter's folder that the paths below it begin with."""
        below = [path for path in paths if self.folder in path.parents]
        return {path.relative_to(self.folder).parts[0] for path in below}


def _choose(paths: list[PurePosixPath]) -> _Chosen:
    """Returns the known files of the only adapter in an archive, or of the adapter whose folder
    contains all others, such as a trainer's output folder. Raises Invalid if there is none such."""
    known = [path for path in paths if path.name in KNOWN_FILES]
    for path in known:
        if known.count(path) > 1:
            raise Invalid(f"{path.name} is in the archive twice", "duplicate_part", path.name)
    folders = sorted(
        {path.parent for path in known}, key=lambda folder: (len(folder.parts), folder)
    )
    if not folders:
        return _Chosen(set(), PurePosixPath())
    outer = folders[0]
    if len({path.name for path in known}) == len(known):
        return _Chosen({*known}, outer)
    configured = [path.parent for path in known if path.name == CONFIG_NAME]
    if outer not in configured or not all(each.is_relative_to(outer) for each in folders):
        shown = ", ".join(str(each)[:64] for each in folders[:8])
        name = next(path.name for path in known if path.parent != outer)
        raise Invalid(
            f"{name} is in the archive twice, because it has several adapters: send one of the"
            f" folders {shown}",
            "duplicate_part",
            name,
        )
    return _Chosen({path for path in known if path.parent == outer}, outer)


class _Writer:
    """Writes the known files of one archive and counts their bytes."""

    def __init__(self, target: StagingFolder) -> None:
        self._target = target
        self._bytes_left = target.max_bytes

    def declare(self, name: str, num_bytes: int) -> None:
        """Reserves the bytes that a member declares. Raises TooLarge if this member or all members
        together are too large."""
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


def _extract_zip(file: IO[bytes], writer: _Writer) -> list[str]:
    num_members = _count_zip_members(file)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) != num_members:
                raise Invalid(
                    "the .zip's directory has another length than it says", "archive_format"
                )
            members = [member for member in members if not member.is_dir()]
            paths = [PurePosixPath(member.filename) for member in members]
            chosen = _choose(paths)
            wanted = [
                (path.name, _checked(path.name, member))
                for path, member in zip(paths, members, strict=True)
                if path in chosen.paths
            ]
            for name, member in wanted:
                writer.declare(name, member.file_size)
            writer.check_room()
            for name, member in wanted:
                with archive.open(member) as source:
                    writer.copy(source, name, member.file_size)
            return chosen.name_others(paths)
    except ZIP_ERRORS as error:
        if isinstance(error, OSError) and is_disk_full(error):
            raise
        raise Invalid(f"not a readable .zip: {error}", "archive_format") from error


def _checked(name: str, member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """Returns the member. Raises Invalid if it is not a plain file."""
    kind = member.external_attr >> 16 & 0o170000
    if kind not in (0, 0o100000) or member.flag_bits & 1:
        raise Invalid(f"{name} is not a plain file", "archive_member", name)
    if member.compress_type not in ZIP_METHODS:
        raise Invalid(f"{name} is neither stored nor deflated", "archive_member", name)
    return member


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


def _extract_tar(file: IO[bytes], writer: _Writer) -> list[str]:
    members = list(_tar_members(file))
    paths = [member.path for member in members]
    chosen = _choose(paths)
    for path, kind, num_bytes, start in members:
        if path in chosen.paths:
            if kind not in REGULAR:
                raise Invalid(f"{path.name} is not a plain file", "archive_member", path.name)
            file.seek(start)
            writer.declare(path.name, num_bytes)
            writer.copy(_Part(file, num_bytes), path.name, num_bytes)
    return chosen.name_others(paths)


class _TarMember(NamedTuple):
    """Member of a tar archive that is no folder. kind: type flag. start: offset of its bytes."""

    path: PurePosixPath
    kind: bytes
    num_bytes: int
    start: int


def _tar_members(file: IO[bytes]) -> Iterator[_TarMember]:
    """Yields the members of an archive except folders and headers of long names."""
    for _ in range(MAX_MEMBERS):
        block = file.read(TAR_BLOCK)
        if len(block) < TAR_BLOCK:
            raise Invalid("the .tar is cut short", "archive_format")
        if not any(block):
            return
        stored, summed = _octal(block[148:156]), sum(block[:148]) + sum(block[156:]) + 8 * 32
        if stored != summed:
            raise Invalid("the .tar is damaged", "archive_format")
        name, folder = (
            part.split(b"\0")[0].decode("utf-8", "replace")
            for part in (block[:100], block[345:500])
        )
        kind, num_bytes, start = block[156:157], _octal(block[124:136]), file.tell()
        if kind not in NO_FILES:
            # GNU's format has other fields in the place of the folder.
            path = (
                PurePosixPath(folder, name) if block[257:263] == b"ustar\0" else PurePosixPath(name)
            )
            yield _TarMember(path, kind, num_bytes, start)
        file.seek(start + -(-num_bytes // TAR_BLOCK) * TAR_BLOCK)
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
