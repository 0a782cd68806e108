"""Copies adapters from folders on this machine that the operator has opened to a tenant.

A path is first resolved, including symbolic links, and must then be inside an opened folder. The
components of the path are opened one by one without following links, so that a link that has
replaced one of them in the meantime is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from adapters.format.validator import CONFIG_NAME, PICKLE_NAMES
from admin.uploads.archive import KNOWN_FILES, StagingFolder, max_file_bytes
from store.errors import Invalid, NotFound
from web.errors import TooLarge

CHUNK_BYTES = 4 << 20
UNREADABLE = (
    *(errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV),
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.ESTALE),
)
"""Errors of a path, and not of the disk."""


class OpenedFolders:
    """Folders that the operator has opened to one tenant."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._names = [*self._roots, *(Path(os.path.abspath(root)) for root in roots)]
        """Paths under which clients may name a folder."""

    def copy(self, path: str, staged: StagingFolder) -> None:
        """Copies an adapter's files from the folder `path` into `staged`.

        A pickle is not copied. An empty file of the same name takes its place, and the validator
        refuses it. Raises Invalid if the path or a file in it is outside of the opened folders or
        not a plain file, NotFound if there is no adapter, TooLarge if the files together have more
        bytes than `staged` may have, and OSError for failures of the disk.
        """
        folder = self._resolve(path)
        bytes_left = staged.max_bytes
        for name in KNOWN_FILES:
            file = _real(str(folder / name), path)
            try:
                descriptor = self._open(file, path)
            except FileNotFoundError:
                if name == CONFIG_NAME:
                    raise _missing() from None
                continue
            with open(descriptor, "rb", buffering=0) as source:
                if name in PICKLE_NAMES:
                    (staged.path / name).touch()
                    continue
                limit = max_file_bytes(name, bytes_left)
                num_bytes = os.fstat(descriptor).st_size
                if num_bytes > limit:
                    raise TooLarge(f"{name} has {num_bytes} bytes of at most {limit}", param=name)
                staged.check_room(num_bytes)
                with (staged.path / name).open("xb", buffering=0) as target:
                    bytes_left -= _copy(source.fileno(), target.fileno(), limit, name)

    def _resolve(self, path: str) -> Path:
        """Returns the path with symbolic links resolved. Raises Invalid if it is not absolute or
        not under an opened folder."""
        if "\0" in path or not os.path.isabs(path):
            raise Invalid(
                "lora_path must be an absolute path of a folder on the server's machine",
                "lora_path_form",
                "lora_path",
            )
        # Nothing outside of the opened folders is looked at. What links such as /proc/PID/root lead
        # to would tell which processes live.
        if not any(Path(os.path.normpath(path)).is_relative_to(name) for name in self._names):
            raise self._not_allowed()
        resolved = _real(path, path)
        self._root_of(resolved)
        return resolved

    def _root_of(self, resolved: Path) -> Path:
        """Returns the opened folder that contains a resolved path. Raises Invalid if there is none,
        with the same message whether or not the path exists."""
        for root in self._roots:
            if resolved.is_relative_to(root):
                return root
        raise self._not_allowed()

    def _not_allowed(self) -> Invalid:
        return Invalid(
            "lora_path is not under a folder that the operator has opened to this tenant (setting"
            " adapter_roots): have it opened, or send the files in the body as multipart/form-data",
            "lora_path_not_allowed",
            "lora_path",
        )

    def _open(self, file: Path, path: str) -> int:
        """Returns a file descriptor of a plain file. Raises FileNotFoundError, or Invalid if the
        file is outside of the opened folders, cannot be read, or is not a plain file."""
        root = self._root_of(file)
        if file == root:
            raise _unreadable(f"{path[:256]!r} has a link to a folder")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(root, flags | os.O_DIRECTORY)
        try:
            *folders, name = file.relative_to(root).parts
            for part in folders:
                inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            # Without O_NONBLOCK, opening a pipe would wait for a writer.
            opened = os.open(name, flags | os.O_NONBLOCK, dir_fd=descriptor)
        except OSError as error:
            if error.errno in UNREADABLE:
                reason = f"{file.name} in {path[:256]!r} cannot be read: {error.strerror}"
                raise _unreadable(reason) from None
            raise
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise _unreadable(f"{name} is not a plain file")
        return opened


def _real(path: str, given: str) -> Path:
    """Returns a path with symbolic links resolved. Raises Invalid if a part of it is replaced in
    the meantime or cannot be read. `given` is the client's path."""
    try:
        return Path(os.path.realpath(path))
    except OSError as error:
        raise _unreadable(f"{given[:256]!r} cannot be read: {error.strerror}") from None


def _unreadable(reason: str) -> Invalid:
    return Invalid(reason, "lora_path_unreadable", "lora_path")


def _missing() -> NotFound:
    return NotFound("no adapter there", "lora_path_not_found", "lora_path")


def _copy(source: int, target: int, limit: int, name: str) -> int:
    """Copies a file and returns its number of bytes. Raises TooLarge if the file grows beyond the
    limit in the meantime."""
    copied = 0
    while num := os.sendfile(target, source, None, CHUNK_BYTES):
        copied += num
        if copied > limit:
            raise TooLarge(f"{name} has more than {limit} bytes", param=name)
    return copied
