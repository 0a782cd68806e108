"""Store of immutable adapters and models, by digest. No path contains a name that a user has given.
Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal, Protocol

Kind = Literal["adapters", "models"]

DIGEST = re.compile(r"[0-9a-f]{64}")
WEIGHTS_SUFFIX = ".safetensors"
CHUNK_BYTES = 1 << 20


class NotInStore(LookupError):
    """Error for a digest that is not in the store."""


class StoreUnavailable(OSError):
    """Failure to reach the store, a refusal by the store, or content that differs from what was
    stored."""

    def __init__(self, message: str, refusal: str = "") -> None:
        """message: cause, which may contain addresses. refusal: code of the store's answer, such
        as `AccessDenied`. If it is empty, the store did not answer."""
        super().__init__(message)
        self.reason = f"answers {refusal}" if refusal else "does not answer"
        """End of a sentence about the store. Tenants may read it."""


class Store(Protocol):
    """Store of immutable folders of files, addressed by kind and digest.

    Every method raises ValueError for a digest that is not 64 lower-case hex digits. Any method may
    raise OSError; a network store raises StoreUnavailable if the network or server fails.
    """

    @property
    def is_remote(self) -> bool:
        """Whether a folder is downloaded before it is read, so that readers mostly wait."""
        ...

    @property
    def incoming(self) -> Path:
        """Local folder with the folders that writers are filling before they `put` them."""
        ...

    @property
    def min_free_bytes(self) -> int:
        """Bytes that are kept free on the disk of `incoming`."""
        ...

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises OSError (ENOSPC) unless the disk of `incoming` has room for `num_bytes` bytes in
        addition to `min_free_bytes`."""
        ...

    def stage(self) -> Path:
        """Creates an empty folder (0700) in `incoming` for `put`. The caller removes it if it does
        not call `put`, and uses `hold` during long writes."""
        ...

    def sweep(self, max_age_s: float) -> None:
        """Removes incoming folders that no writer protects with `hold` and that were not changed
        for `max_age_s` seconds."""
        ...

    def put(self, kind: Kind, digest: str, staged: Path, *, durable: bool = True) -> None:
        """Moves a staged folder into the store atomically. If the folder exists already, it is kept
        and the staged one is removed.

        durable: whether to wait until the folder is on the disk, including a folder that another
        writer has stored. If False, a power failure may lose or damage the folder.
        """
        ...

    def adapter_folder(self, digest: str) -> Path:
        """Returns the read-only folder of the adapter's two files, which have the names that peft
        uses. Raises NotInStore."""
        ...

    def adapter_sizes(self, digest: str) -> dict[str, int]:
        """Returns the bytes of an adapter's files by name, read from the store itself rather than a
        cache. Raises NotInStore."""
        ...

    def adapter_chunks(self, digest: str, name: str) -> Iterator[bytes]:
        """Yields the bytes of one of the adapter's files. Raises NotInStore."""
        ...

    def model_folder(self, digest: str, *, weights: bool = True) -> Path:
        """Returns the read-only folder of a canonical base model. If `weights` is False, its
        safetensors files may be missing. Raises NotInStore."""
        ...

    def exists(self, kind: Kind, digest: str) -> bool: ...

    def delete(self, kind: Kind, digest: str) -> None:
        """Removes the folder if it exists."""
        ...


class LocalStore:
    """Store in a folder: adapters/<digest>/, models/<digest>/ and incoming/ (being written)."""

    is_remote = False

    def __init__(self, root: Path, *, min_free_bytes: int = 0) -> None:
        """min_free_bytes: bytes that are kept free on the disk."""
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
            # Errors are ignored, because the folder may be removed already, or the file system may
            # have no locks, so that it is unknown whether a writer holds the folder.
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
                # The writer that stored the folder may not have waited until it was on the disk.
                _fsync_folder(target)
        if durable:
            fsync(target.parent)

    def adapter_folder(self, digest: str) -> Path:
        return self._existing("adapters", digest)

    def adapter_sizes(self, digest: str) -> dict[str, int]:
        folder = self._existing("adapters", digest)
        return {file.name: file.stat().st_size for file in folder.iterdir()}

    def adapter_chunks(self, digest: str, name: str) -> Iterator[bytes]:
        with (self._existing("adapters", digest) / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def model_folder(self, digest: str, *, weights: bool = True) -> Path:
        return self._existing("models", digest)

    def exists(self, kind: Kind, digest: str) -> bool:
        return self._locate(kind, digest).is_dir()

    def delete(self, kind: Kind, digest: str) -> None:
        # The folder is renamed first, so that a partly deleted folder is never visible.
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
    """Raises OSError (ENOSPC) unless the folder's disk has room for `num_bytes` bytes in addition
    to `min_free_bytes`."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free} bytes are free, {num_bytes} are needed and {min_free_bytes} kept",
        )


def check_address(kind: Kind, digest: str) -> None:
    """Raises ValueError unless kind and digest form an address in a store."""
    if kind not in ("adapters", "models") or not DIGEST.fullmatch(digest):
        raise ValueError(f"not a store address: {kind!r}, {digest[:80]!r}")


@contextlib.contextmanager
def hold(folder: Path) -> Generator[None]:
    """Context manager that protects an incoming folder from `sweep`, at most until this process
    ends. Raises BlockingIOError if another `hold` protects the folder, and FileNotFoundError if the
    folder does not exist."""
    with _open(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # without locks in the file system, `sweep` removes nothing
        folder.stat()
        yield


def last_touched(folder: Path) -> float:
    """Returns the time of the last change in an incoming folder, in seconds since the epoch."""
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_read_only(error: OSError) -> bool:
    """Whether the store's disk or its permissions prevent writing."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def _open(folder: Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    """Waits until a folder and its files are on the disk."""
    for file in folder.iterdir():
        fsync(file)
    fsync(folder)


def fsync(path: Path) -> None:
    """Waits until a file's content, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
