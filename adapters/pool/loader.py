"""Loads adapter images to the host, from the image cache or from the store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

from adapters.errors import AdapterRejected
from adapters.format.signature import is_signed
from adapters.format.validator import AdapterFiles, content_digest
from adapters.manifest import BaseModelShape
from adapters.pool.host_slab import HostSlab
from adapters.pool.image import ImageCache
from adapters.pool.lora import ImageLayout, pack
from adapters.pool.packed_image import AdapterImage
from adapters.pool.source import AdapterUnavailable
from adapters.reference import AdapterSignature
from adapters.store.folder import DIGEST, NotInStore, Store, StoreUnavailable
from ops.base import Ops

P = ParamSpec("P")
T = TypeVar("T")


class AdapterLoader:
    """Loader of adapter images to the host. Raises AdapterUnavailable if the store cannot provide
    the adapter."""

    def __init__(
        self,
        store: Store,
        base: BaseModelShape,
        dtype: torch.dtype,
        ops: Ops,
        cache: ImageCache,
        slab: HostSlab | None = None,
    ) -> None:
        """slab: pinned memory in which images are placed, for asynchronous copies to the device."""
        self._store = store
        self._base = base
        self._cache = cache
        self._slab = slab
        self._packing = Lock()
        """Held while an image is packed, which keeps one core busy."""
        self.layout = ImageLayout(base.num_layers, dtype, ops.factor_layout, len(base.projections))

    def is_cached(self, digest: str) -> bool:
        return self._cache.has(self.layout.version, digest)

    def fetch(
        self,
        digest: str,
        proved: str = "",
        signed: AdapterSignature | None = None,
        *,
        keeps_file: bool = True,
    ) -> AdapterImage:
        """Loads an image to the host, from the cache if possible, or else by packing it from the
        store.

        proved: checksum that the image must have, or empty. A cached image with another checksum is
        rebuilt. signed: signature to verify before loading, if any. keeps_file: whether to write a
        newly packed image to the cache.
        """
        if not DIGEST.fullmatch(digest):
            raise AdapterUnavailable("adapter.store.missing", "not a digest")
        if signed and not is_signed(signed.public_key, signed.signature, digest):
            message = f"the signature of adapter {digest} is not of its key"
            raise AdapterUnavailable("adapter.signature.invalid", message)
        image = self._cache.load(self.layout.version, digest)
        if image is None or proved not in ("", image.checksum):
            image = self._build(digest, proved, keeps_file)
        placed = None if self._slab is None else self._slab.copy(image.payload)
        # If the slab is full, the image stays unpinned, and its copy blocks the host thread.
        return image if placed is None else replace(image, payload=placed)

    def _build(self, digest: str, proved: str, keeps_file: bool) -> AdapterImage:
        """Packs the image from the store's files. Deletes the cached image first, and caches the
        new image if `keeps_file`."""
        self._cache.delete(self.layout.version, digest)
        try:
            folder = self._store.adapter_folder(digest)
            with self._packing:
                tables, payload = pack(checked_files(folder, digest), self._base, self.layout)
        except NotInStore:
            raise AdapterUnavailable("adapter.store.missing", f"no adapter {digest}") from None
        except OSError as error:
            # Tenants read this message, so it names no path or address. The log has the cause.
            reason = error.strerror
            if isinstance(error, StoreUnavailable):
                reason = f"the store {error.reason}"
            raise AdapterUnavailable(
                "adapter.store.unreadable", f"reading the adapter from the store failed: {reason}"
            ) from error
        except AdapterRejected as error:
            raise AdapterUnavailable(error.code, str(error)) from error
        image = AdapterImage.of(digest, tables, payload)
        if proved not in ("", image.checksum):
            raise AdapterUnavailable(
                "adapter.image.mismatch",
                f"the image of {digest} is {image.checksum}, the one proved was {proved}",
            )
        if keeps_file:
            self._cache.save(self.layout.version, image)
        return image


def stored_files(store: Store, digest: str) -> AdapterFiles:
    """Returns the adapter's files after checking their digest. Raises AdapterUnavailable or
    OSError."""
    if not DIGEST.fullmatch(digest):
        raise AdapterUnavailable("adapter.store.missing", "not a digest")
    try:
        return checked_files(store.adapter_folder(digest), digest)
    except NotInStore:
        raise AdapterUnavailable("adapter.store.missing", f"no adapter {digest}") from None


def checked_files(folder: Path, digest: str) -> AdapterFiles:
    """Returns the adapter's files in the folder after checking their digest."""
    files = AdapterFiles.in_folder(folder)
    if content_digest(files) != digest:
        raise AdapterUnavailable("adapter.store.corrupt", f"adapter {digest} is damaged")
    return files


class LoaderThreads(ThreadPoolExecutor):
    """Executor with `count` threads. torch uses no further threads for their work, so that the
    other cores are left to the engine's step. Calls `on_done` after each task."""

    def __init__(
        self, name: str, on_done: Callable[[], None] = lambda: None, *, count: int = 1
    ) -> None:
        super().__init__(count, name, torch.set_num_threads, (1,))
        self._on_done = on_done

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._on_done())
        return future
