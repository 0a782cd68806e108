"""Files and folders that only one account can access."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from loraplex.errors import NotPrivate

SOCKET_PATH_LIMIT = 103
"""Maximum bytes of a socket's path on every platform."""


def make_private_folder(folder: Path, owner: tuple[int, int] | None = None) -> Path:
    """Creates `folder` with mode 0700 for `owner`, or checks that the existing folder has this mode
    and owner. `owner` is a uid and a gid, by default those of this account.

    Raises NotPrivate if the folder has another mode or owner. Never changes permissions of an
    existing folder.
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


def check_owner(folder: Path) -> None:
    """Raises NotPrivate if the folder, or a link to it, is owned by an account other than root and
    this one."""
    for found in (folder.lstat(), folder.stat()):
        if found.st_uid not in (0, os.geteuid()):
            raise NotPrivate(
                f"{folder} belongs to user {found.st_uid}, which could replace what is kept there:"
                " give a folder that does not exist yet, which is then made with mode 0700"
            )


def may_be_replaced(folder: Path) -> bool:
    """Returns whether other accounts could replace the folder or the files in it.

    Sticky folders do not count, and neither does write permission for this account's own groups.
    Parents of a folder that this account owns do not count either, because a replacement of the
    folder would have another owner and be refused.
    """
    is_ours = folder.stat().st_uid == os.geteuid()
    return any(map(_is_open, [folder] if is_ours else [folder, *folder.parents]))


def _is_open(folder: Path) -> bool:
    found = folder.stat()
    if found.st_mode & stat.S_ISVTX:
        return False
    is_ours = found.st_gid in (os.getegid(), *os.getgroups())
    return bool(found.st_mode & (stat.S_IWOTH if is_ours else stat.S_IWOTH | stat.S_IWGRP))


def read_private(path: Path, owner: int | None = None) -> bytes:
    """Returns the contents of a file that is owned by `owner` (default: this account) or root, and
    that is not world-writable.

    Does not follow links. Raises OSError, or NotPrivate for any other file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(f"{path} is a link, which is not followed to a secret") from None
        raise
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        owners = {0, os.geteuid() if owner is None else owner}
        if os.geteuid() == 0 and owner is None:
            # Root may manage a service that runs as another account, which owns the folder.
            owners.add(path.parent.stat().st_uid)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners:
            raise NotPrivate(f"{path} is of user {found.st_uid}, not ours: remove it")
        if found.st_mode & stat.S_IWOTH:
            raise NotPrivate(f"others can write to {path}: chmod 600, if it is yours")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Replaces the file atomically, with mode 0600. Raises OSError with the file's name."""
    fresh = _write_aside(path, text)
    try:
        fresh.rename(path)
    except OSError as error:
        fresh.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_locked(path: Path, text: str) -> int:
    """Replaces the file like `write_private`, and locks it before it is visible. The lock is
    released when the returned descriptor is closed or the process ends."""
    fresh = _write_aside(path, text)
    descriptor = os.open(fresh, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(path)
    return descriptor


def is_locked(path: Path) -> bool:
    """Returns whether the process of `write_locked` still holds its lock. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def make_private(path: Path, text: str) -> None:
    """Creates the file unless it exists. If several calls run at a time, exactly one creates it."""
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
    """Returns the folder for sockets: inside `home`, unless their paths would be too long."""
    folder = home / "socket"
    if len(os.fsencode(folder / longest_name)) <= SOCKET_PATH_LIMIT:
        return folder
    return Path(tempfile.gettempdir()) / f"loraplex-{path_digest(home)}"


def path_digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
