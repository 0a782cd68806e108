"""Where immutable versions live, by digest: no name of a user's becomes a path. Torch-free."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Literal, Protocol

Kind = Literal["adapters", "models"]

DIGEST = re.compile(r"[0-9a-f]{64}")


class NotInStore(LookupError):
    """The store has no such digest."""


class Store(Protocol):
    """Folders of files, addressed by (kind, digest) and never changed once there.

    A digest that is not 64 lower-case hex digits raises ValueError everywhere.
    """

    def stage(self) -> Path:
        """A fresh empty folder (0700) for `put` to take; the caller removes it if it never does."""
        ...

    def put(self, kind: Kind, digest: str, staged: Path) -> None:
        """Moves a staged folder in, whole or not at all. One already there stays as it is."""
        ...

    def adapter_folder(self, digest: str) -> Path:
        """The two files as peft names them, to be read only. Raises NotInStore."""
        ...

    def model_folder(self, digest: str) -> Path:
        """A canonical base model, to be read only. Raises NotInStore."""
        ...

    def exists(self, kind: Kind, digest: str) -> bool: ...

    def delete(self, kind: Kind, digest: str) -> None:
        """Removes it if it is there."""
        ...

    def digests(self, kind: Kind) -> list[str]: ...


class LocalStore:
    """A store in a folder: adapters/<digest>/, models/<digest>/ and incoming/ (being written)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name in ("adapters", "models", "incoming"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def stage(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._root / "incoming"))

    def sweep(self, max_age_s: float) -> None:
        """Removes staged folders that their writers left behind."""
        for folder in (self._root / "incoming").iterdir():
            if time.time() - folder.stat().st_mtime > max_age_s:
                shutil.rmtree(folder, ignore_errors=True)

    def put(self, kind: Kind, digest: str, staged: Path) -> None:
        target = self._locate(kind, digest)
        for file in staged.iterdir():
            file.chmod(0o444)
            _fsync(file)
        _fsync(staged)
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(staged)
        _fsync(target.parent)

    def adapter_folder(self, digest: str) -> Path:
        return self._existing("adapters", digest)

    def model_folder(self, digest: str) -> Path:
        return self._existing("models", digest)

    def exists(self, kind: Kind, digest: str) -> bool:
        return self._locate(kind, digest).is_dir()

    def delete(self, kind: Kind, digest: str) -> None:
        # Out of sight in one step first, so that nobody ever sees half a folder.
        doomed = self.stage()
        try:
            self._locate(kind, digest).rename(doomed / "deleted")
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(doomed)

    def digests(self, kind: Kind) -> list[str]:
        return sorted(entry.name for entry in (self._root / kind).iterdir())

    def _existing(self, kind: Kind, digest: str) -> Path:
        target = self._locate(kind, digest)
        if not target.is_dir():
            raise NotInStore(f"{kind}/{digest}")
        return target

    def _locate(self, kind: Kind, digest: str) -> Path:
        if kind not in ("adapters", "models") or not DIGEST.fullmatch(digest):
            raise ValueError(f"not a store address: {kind!r}, {digest[:80]!r}")
        return self._root / kind / digest


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
