"""Where immutable versions live, by digest: no name of a user's becomes a path. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from adapters.readable import Readable

Kind = Literal["adapters", "models"]

DIGEST = re.compile(r"[0-9a-f]{64}")
WEIGHTS_SUFFIX = ".safetensors"


class NotInStore(LookupError):
    """The store has no such digest."""


class StoreUnavailable(OSError):
    """The store cannot be reached, or what it sent is not what was put there."""


class Store(Protocol):
    """Folders of files, addressed by (kind, digest) and never changed once there.

    A digest that is not 64 lower-case hex digits raises ValueError everywhere. Any method may
    raise OSError; a store behind a network raises StoreUnavailable when that fails it.
    """

    @property
    def incoming(self) -> Path:
        """A folder of this machine, of which each folder is something being written."""
        ...

    @property
    def min_free_bytes(self) -> int:
        """The reserve on the disk of `incoming` that nothing is written into."""
        ...

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises OSError (ENOSPC) unless the disk of `incoming` can take so much and keep its
        reserve."""
        ...

    def stage(self) -> Path:
        """A fresh empty folder (0700) in `incoming` for `put` to take; the caller removes it if it
        never does. `hold` it while that takes long."""
        ...

    def sweep(self, max_age_s: float) -> None:
        """Removes what writers left behind: not held, and untouched for so long."""
        ...

    def put(self, kind: Kind, digest: str, staged: Path, *, durable: bool = True) -> None:
        """Moves a staged folder in, whole or not at all. One already there stays as it is.

        durable: returns when it is on the disk, whoever put it there. Otherwise a power failure may
        lose or damage it."""
        ...

    def adapter_folder(self, digest: str) -> Path:
        """The two files as peft names them, to be read only. Raises NotInStore."""
        ...

    def adapter_sizes(self, digest: str) -> dict[str, int]:
        """Name to bytes of an adapter's files, as the store itself has them now and not a cache of
        it. Raises NotInStore."""
        ...

    def open_adapter_file(self, digest: str, name: str) -> AbstractContextManager[Readable]:
        """One of those files. Raises NotInStore."""
        ...

    def model_folder(self, digest: str, *, weights: bool = True) -> Path:
        """A canonical base model, to be read only; without `weights` its safetensors may be
        missing. Raises NotInStore."""
        ...

    def exists(self, kind: Kind, digest: str) -> bool: ...

    def delete(self, kind: Kind, digest: str) -> None:
        """Removes it if it is there."""
        ...


class LocalStore:
    """A store in a folder: adapters/<digest>/, models/<digest>/ and incoming/ (being written)."""

    def __init__(self, root: Path, *, min_free_bytes: int = 0) -> None:
        """`min_free_bytes` of its disk are left to others."""
        self._root = root
        self._min_free_bytes = min_free_bytes
        for name in ("adapters", "models", "incoming"):
            (root / name).mkdir(parents=True, exist_ok=True)

    @property
    def incoming(self) -> Path:
        return self._root / "incoming"

    @property
    def min_free_bytes(self) -> int:
        return self._min_free_bytes

    def check_room(self, num_bytes: int = 0) -> None:
        check_free_space(self.incoming, self._min_free_bytes, num_bytes)

    def stage(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.incoming))

    def sweep(self, max_age_s: float) -> None:
        for folder in self.incoming.iterdir():
            # Gone meanwhile, or on a file system without locks: then its writer is not known.
            with contextlib.suppress(OSError), _open(folder) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - last_touched(folder) > max_age_s:
                    shutil.rmtree(folder, ignore_errors=True)

    def put(self, kind: Kind, digest: str, staged: Path, *, durable: bool = True) -> None:
        target = self._locate(kind, digest)
        for file in staged.iterdir():
            file.chmod(0o444)
        if durable:
            _fsync_folder(staged)
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(staged)
            if durable:
                # The writer before may not have waited for the disk.
                _fsync_folder(target)
        if durable:
            fsync(target.parent)

    def adapter_folder(self, digest: str) -> Path:
        return self._existing("adapters", digest)

    def adapter_sizes(self, digest: str) -> dict[str, int]:
        folder = self._existing("adapters", digest)
        return {file.name: file.stat().st_size for file in folder.iterdir()}

    def open_adapter_file(self, digest: str, name: str) -> AbstractContextManager[Readable]:
        return (self._existing("adapters", digest) / name).open("rb")

    def model_folder(self, digest: str, *, weights: bool = True) -> Path:
        return self._existing("models", digest)

    def exists(self, kind: Kind, digest: str) -> bool:
        return self._locate(kind, digest).is_dir()

    def delete(self, kind: Kind, digest: str) -> None:
        # Out of sight in one step first, so that half a folder is never seen.
        doomed = self.stage()
        try:
            self._locate(kind, digest).rename(doomed / "deleted")
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(doomed)

    def _existing(self, kind: Kind, digest: str) -> Path:
        target = self._locate(kind, digest)
        if not target.is_dir():
            raise NotInStore(f"{kind}/{digest}")
        return target

    def _locate(self, kind: Kind, digest: str) -> Path:
        check_address(kind, digest)
        return self._root / kind / digest


def check_free_space(folder: Path, min_free_bytes: int, num_bytes: int) -> None:
    """Raises OSError (ENOSPC) unless the disk has room for the bytes beside the reserve."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free} bytes are free, {num_bytes} are needed and {min_free_bytes} kept",
        )


def check_address(kind: Kind, digest: str) -> None:
    """Raises ValueError for what is no address in a store."""
    if kind not in ("adapters", "models") or not DIGEST.fullmatch(digest):
        raise ValueError(f"not a store address: {kind!r}, {digest[:80]!r}")


@contextlib.contextmanager
def hold(folder: Path) -> Generator[None]:
    """Keeps an incoming folder from `sweep` and from other holders, this process living or not
    longer. Raises BlockingIOError if it is held, FileNotFoundError if it is gone."""
    with _open(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks, where nothing is swept either
        folder.stat()
        yield


def last_touched(folder: Path) -> float:
    """Time (s since the epoch) of the last change in an incoming folder."""
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_read_only(error: OSError) -> bool:
    """Whether the store's disk, or its permissions, let nothing be written."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def _open(folder: Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    """Returns when a folder and its files are on the disk."""
    for file in folder.iterdir():
        fsync(file)
    fsync(folder)


def fsync(path: Path) -> None:
    """Returns when the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
