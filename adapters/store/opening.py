"""Opens the store at a location, which is a folder or `s3://BUCKET[/PREFIX]`. Torch-free."""

from __future__ import annotations

from pathlib import Path

from adapters.installing import install_command
from adapters.store.folder import LocalStore, Store

S3_SCHEME = "s3://"


def open_store(
    location: str, cache: Path, *, min_free_bytes: int = 0, cache_bytes: int = 4 << 30
) -> Store:
    """Opens the store at a location. cache: folder for copies of files of a remote store.
    cache_bytes: maximum bytes of the adapters in the cache. min_free_bytes: bytes that are kept
    free on the disk.

    Raises ValueError if the location is invalid, or if the needed library is not installed.
    """
    if not location.startswith(S3_SCHEME):
        if "://" in location:
            raise ValueError(f"{location}: a store is a folder or s3://BUCKET/PREFIX")
        return LocalStore(Path(location), min_free_bytes=min_free_bytes)
    try:
        from adapters.store.objects import ObjectStore
    except ImportError as error:
        raise ValueError(
            f"{location}: a store in S3 needs boto3: {install_command('s3')}"
        ) from error
    bucket, _, prefix = location.removeprefix(S3_SCHEME).partition("/")
    if not bucket:
        raise ValueError(f"{location} names no bucket")
    return ObjectStore(
        bucket, prefix, cache, min_free_bytes=min_free_bytes, cache_bytes=cache_bytes
    )
