"""Store in a bucket, with a local folder as its cache. Torch-free.

<prefix>/<kind>/<digest>/<put>/<file>    files of one `put`
<prefix>/index/<kind>/<digest>           index object, written last; names the put and its files

A version is stored if and only if its index object exists.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Annotated, get_args

import msgspec

from adapters.store.buckets import Bucket, ObjectAbsent
from adapters.store.folder import (
    WEIGHTS_SUFFIX,
    Kind,
    LocalStore,
    NotInStore,
    StoreUnavailable,
    check_address,
)

UNFINISHED_S = 24 * 3600.0
"""Seconds after which a file that no index entry names is considered the rest of a failed put."""
SWEEP_S = 3600.0
IN_USE_S = 60.0
"""Seconds after its last use for which a cached adapter is not removed, because another process
that shares the cache may still be reading the files. The longest such use, a verification, takes at
most 30 s."""

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]


class IndexEntry(msgspec.Struct, frozen=True):
    """Content of an index object. put: random name of the `put` call that stored the files, which
    is a part of their keys. files: size in bytes of each file, by name."""

    put: FileName
    files: dict[FileName, int]


Target = tuple[LocalStore, Kind, str]
"""Address of a cached folder: the cache, and the kind and digest of the folder."""


class ObjectStore:
    """Store in a bucket.

    Downloads a folder once and then reads it from the cache. The cached adapters have at most about
    `cache_bytes` bytes in total, unless more were used in the last `IN_USE_S` seconds.
    """

    is_remote = True

    def __init__(
        self, bucket: Bucket, prefix: str, cache: Path, *, min_free_bytes: int, cache_bytes: int
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._cache = LocalStore(cache, min_free_bytes=min_free_bytes)
        # Cache of model folders without weights, that is, with tokenizer and config only.
        self._heads = LocalStore(cache / "heads", min_free_bytes=min_free_bytes)
        self._cache_root = cache / "adapters"
        self._cache_bytes = cache_bytes
        self._bytes_until_listing = 0
        """Bytes of adapters that may be added to the cache before it is listed again."""
        self._bringing: set[Target] = set()
        """Addresses of cached folders that a thread is checking or downloading."""
        self._brought = threading.Condition()
        """Condition that guards `_bringing` and `_bytes_until_listing`. Its lock is held while
        folders are removed from a cache."""
        self._swept_at = 0.0

    @property
    def incoming(self) -> Path:
        return self._cache.incoming

    @property
    def min_free_bytes(self) -> int:
        return self._cache.min_free_bytes

    def check_room(self, num_bytes: int = 0) -> None:
        self._cache.check_room(num_bytes)

    def stage(self) -> Path:
        return self._cache.stage()

    def put(self, kind: Kind, digest: str, staged: Path, *, durable: bool = True) -> None:
        is_there = self.exists(kind, digest)
        # An adapter is uploaded even if it exists, because a faster put would reveal to a tenant
        # that another has uploaded the same adapter.
        if is_there and kind == "models":
            shutil.rmtree(staged)
            return
        entry = IndexEntry(
            put=secrets.token_hex(8),
            files={file.name: file.stat().st_size for file in staged.iterdir()},
        )
        keys = {name: self._file(kind, digest, entry, name) for name in entry.files}
        for name, key in keys.items():
            self._bucket.write(key, staged / name)
        if is_there:
            for key in keys.values():
                self._bucket.delete(key)
            shutil.rmtree(staged)
            return
        self._bucket.write(self._index(kind, digest), msgspec.json.encode(entry))
        with self._alone((self._cache, kind, digest)):
            self._cache.put(kind, digest, staged, durable=durable)
            if kind == "adapters":
                self._trim(entry)

    def adapter_folder(self, digest: str) -> Path:
        return self._bring("adapters", digest, self._cache, lambda _name: True)

    def adapter_sizes(self, digest: str) -> dict[str, int]:
        entry = self._entry("adapters", digest)
        sizes: dict[str, int] = {}
        for name in entry.files:
            with contextlib.suppress(ObjectAbsent):
                sizes[name] = self._bucket.size(self._file("adapters", digest, entry, name))
        return sizes

    def adapter_chunks(self, digest: str, name: str) -> Iterator[bytes]:
        entry = self._entry("adapters", digest)
        return self._bucket.chunks(self._file("adapters", digest, entry, name))

    def model_folder(self, digest: str, *, weights: bool = True) -> Path:
        if weights or self._cache.exists("models", digest):
            return self._bring("models", digest, self._cache, lambda _name: True)
        return self._bring(
            "models", digest, self._heads, lambda name: not name.endswith(WEIGHTS_SUFFIX)
        )

    def exists(self, kind: Kind, digest: str) -> bool:
        return self._find(kind, digest) is not None

    def delete(self, kind: Kind, digest: str) -> None:
        self._bucket.delete(self._index(kind, digest))
        for key, _ in self._bucket.list(f"{self._prefix}{kind}/{digest}/"):
            self._bucket.delete(key)
        with self._brought:
            self._cache.delete(kind, digest)
            self._heads.delete(kind, digest)

    def sweep(self, max_age_s: float) -> None:
        """Removes old incoming folders from the cache. Once an hour, also removes files of failed
        puts that are at least a day old from the bucket."""
        self._cache.sweep(max_age_s)
        self._heads.sweep(max_age_s)
        if time.monotonic() - self._swept_at > SWEEP_S:
            self._swept_at = time.monotonic()
            self.sweep_bucket(UNFINISHED_S)

    def sweep_bucket(self, max_age_s: float) -> None:
        """Removes files that no index entry names, and parts of unfinished uploads. Files and
        uploads that are younger than `max_age_s` seconds stay."""
        before = datetime.now(UTC) - timedelta(seconds=max_age_s)
        for kind in get_args(Kind):
            self._sweep_files(kind, before)
        self._bucket.discard_uploads(self._prefix, before)

    def _sweep_files(self, kind: Kind, before: datetime) -> None:
        """Merges the sorted lists of files and of index entries. Reads an entry only if it may not
        name the files that are stored."""
        prefix = f"{self._prefix}{kind}/"
        indexed = (
            key.rpartition("/")[2] for key, _ in self._bucket.list(f"{self._prefix}index/{kind}/")
        )
        named = next(indexed, None)
        for digest, files in groupby(
            self._bucket.list(prefix), lambda file: file[0][len(prefix) :].split("/")[0]
        ):
            while named is not None and named < digest:
                named = next(indexed, None)
            stored = [(key, key[len(prefix) :].split("/")[1], old < before) for key, old in files]
            has_one_put = len({put for _, put, _ in stored}) == 1
            if (named == digest and has_one_put) or not any(is_old for *_, is_old in stored):
                continue
            entry = self._find(kind, digest)
            for key, put, is_old in stored:
                if is_old and (entry is None or entry.put != put):
                    self._bucket.delete(key)

    def _bring(
        self, kind: Kind, digest: str, cache: LocalStore, is_wanted: Callable[[str], bool]
    ) -> Path:
        """Returns the folder in the cache, downloading it if needed."""
        with self._alone((cache, kind, digest)):
            if not cache.exists(kind, digest):
                entry = self._entry(kind, digest)
                self._download(kind, digest, entry, cache, is_wanted)
                if kind == "adapters":
                    self._trim(entry)
            is_adapter = kind == "adapters"
            folder = cache.adapter_folder(digest) if is_adapter else cache.model_folder(digest)
            # The folder is marked as just used, before another thread may trim the cache. Errors
            # are ignored, because the disk may be read-only.
            with contextlib.suppress(OSError):
                os.utime(folder)
            return folder

    @contextlib.contextmanager
    def _alone(self, target: Target) -> Generator[None]:
        """Context manager that lets only one thread at a time work on the cached folder `target`.
        Threads that work on other folders do not wait."""
        with self._brought:
            self._brought.wait_for(lambda: target not in self._bringing)
            self._bringing.add(target)
        try:
            yield
        finally:
            with self._brought:
                self._bringing.remove(target)
                self._brought.notify_all()

    def _download(
        self,
        kind: Kind,
        digest: str,
        entry: IndexEntry,
        cache: LocalStore,
        is_wanted: Callable[[str], bool],
    ) -> None:
        staged = cache.stage()
        try:
            for name, num_bytes in entry.files.items():
                if not is_wanted(name):
                    continue
                cache.check_room(num_bytes)
                key = self._file(kind, digest, entry, name)
                with (staged / name).open("wb") as file:
                    file.writelines(self._bucket.chunks(key))
                if (got := (staged / name).stat().st_size) != num_bytes:
                    raise StoreUnavailable(f"{key} has {got} bytes, not {num_bytes}")
            cache.put(kind, digest, staged)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _trim(self, added: IndexEntry) -> None:
        """Counts an adapter that was added to the cache. If the cached adapters exceed
        `cache_bytes`, removes the least recently used adapters, except adapters that a thread is
        checking or downloading, and adapters used in the last `IN_USE_S` seconds. Frees 1/16 of
        `cache_bytes`, so that the cache is not listed again for every new adapter. A process lists
        the cache whenever it has added 1/16 of `cache_bytes`, because other processes of this
        machine may use the same cache."""
        with self._brought:
            self._bytes_until_listing -= sum(added.files.values())
            if self._bytes_until_listing >= 0:
                return
            found: list[tuple[float, int, Path]] = []
            for folder in self._cache_root.iterdir():
                # Another process may have removed the folder.
                with contextlib.suppress(FileNotFoundError):
                    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
                    found.append((folder.stat().st_mtime, num_bytes, folder))
            total = sum(num_bytes for _, num_bytes, _ in found)
            margin = self._cache_bytes // 16
            target = self._cache_bytes - margin if total > self._cache_bytes else total
            for used_at, num_bytes, folder in sorted(found):
                if total <= target or used_at > time.time() - IN_USE_S:
                    break
                if (self._cache, "adapters", folder.name) not in self._bringing:
                    self._cache.delete("adapters", folder.name)
                    total -= num_bytes
            self._bytes_until_listing = min(margin, self._cache_bytes - total)

    def _entry(self, kind: Kind, digest: str) -> IndexEntry:
        """Returns the entry of an adapter or base model in the store's index. Raises NotInStore."""
        entry = self._find(kind, digest)
        if entry is None:
            raise NotInStore(f"{kind}/{digest}")
        return entry

    def _find(self, kind: Kind, digest: str) -> IndexEntry | None:
        key = self._index(kind, digest)
        try:
            return msgspec.json.decode(self._bucket.read(key), type=IndexEntry)
        except ObjectAbsent:
            return None
        except msgspec.DecodeError as error:
            raise StoreUnavailable(f"{key}: {error}") from error

    def _index(self, kind: Kind, digest: str) -> str:
        check_address(kind, digest)
        return f"{self._prefix}index/{kind}/{digest}"

    def _file(self, kind: Kind, digest: str, entry: IndexEntry, name: str) -> str:
        return f"{self._prefix}{kind}/{digest}/{entry.put}/{name}"
