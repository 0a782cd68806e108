"""Files and folders for one account alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from loraplex.errors import NotPrivate

SOCKET_PATH_LIMIT = 103
"""Bytes of a socket's path that every platform takes."""


def make_private_folder(folder: Path, owner: tuple[int, int] | None = None) -> Path:
    """Makes `folder` with mode 0700 for `owner` (uid, gid; default us), or checks that it is so.

    Raises NotPrivate; permissions of what exists are never changed.
    """
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
        if owner:
            os.chown(folder, *owner)
    found = folder.lstat()
    uid = owner[0] if owner else os.geteuid()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise NotPrivate(f"{folder} must be a folder of user {uid} with mode 0700")
    return folder


def write_private(path: Path, text: str) -> None:
    """Replaces the file as a whole; mode 0600 from its first byte. Raises OSError that names it."""
    fresh = _write_aside(path, text)
    try:
        fresh.rename(path)
    except OSError as error:
        fresh.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def make_private(path: Path, text: str) -> None:
    """The same unless the file is there: of several that make it at once, one does."""
    fresh = _write_aside(path, text)
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(fresh)
    fresh.unlink()


def _write_aside(path: Path, text: str) -> Path:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return fresh


def socket_folder(home: Path, longest_name: str) -> Path:
    """Where sockets of `home` go: inside it, unless their paths are too long for a socket."""
    folder = home / "socket"
    if len(os.fsencode(folder / longest_name)) <= SOCKET_PATH_LIMIT:
        return folder
    return Path(tempfile.gettempdir()) / f"loraplex-{path_digest(home)}"


def path_digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
