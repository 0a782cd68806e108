"""Opens the store at a location, which is a folder or a bucket: `s3://BUCKET[/PREFIX]`, `gs://…` or
`az://…`. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adapters.installing import install_command
from adapters.store.folder import LocalStore, Store

if TYPE_CHECKING:
    from adapters.store.buckets import Bucket

SCHEMES = ("s3", "gs", "az")
"""Schemes of buckets. The optional part of loraplex that a scheme needs has its name."""


def open_store(
    location: str, cache: Path, *, min_free_bytes: int = 0, cache_bytes: int = 4 << 30
) -> Store:
    """Opens the store at a location. cache: folder for copies of files of a remote store.
    cache_bytes: maximum bytes of the adapters in the cache. min_free_bytes: bytes that are kept
    free on the disk.

    Raises ValueError if the location is invalid, a needed library is not installed, or the
    environment does not say how the bucket is reached.
    """
    scheme, separator, address = location.partition("://")
    if not separator:
        return LocalStore(Path(location), min_free_bytes=min_free_bytes)
    if scheme not in SCHEMES:
        raise ValueError(
            f"{location}: a store is a folder, or a BUCKET/PREFIX after s3://, gs:// or az://"
        )
    name, _, prefix = address.partition("/")
    if not name:
        raise ValueError(f"{location} names no bucket")
    if prefix.strip("/") and {"", ".", ".."} & set(prefix.strip("/").split("/")):
        raise ValueError(f"{location}: a prefix has no empty parts and no '.' or '..'")
    try:
        from adapters.store.objects import ObjectStore

        bucket = open_bucket(scheme, name)
    except ImportError as error:
        needed = f"{error.name}: {install_command(scheme)}"
        raise ValueError(f"{location}: this store needs {needed}") from error
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    return ObjectStore(
        bucket, prefix, cache, min_free_bytes=min_free_bytes, cache_bytes=cache_bytes
    )


def open_bucket(scheme: str, name: str) -> Bucket:
    """Opens the bucket of a location with the scheme `s3`, `gs` or `az`. Raises ImportError, and
    ValueError if the environment does not say how the bucket is reached."""
    if scheme == "s3":
        from adapters.store.s3 import S3Bucket

        return S3Bucket(name)
    from adapters.store import buckets

    return buckets.open_bucket(scheme, name)
