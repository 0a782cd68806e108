"""Buckets of S3, Google Cloud Storage and Azure, opened with obstore. Torch-free."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from adapters.store.folder import StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

CLIENT: ClientConfig = {
    # The operator may name an endpoint of plain HTTP.
    "allow_http": True,
    "connect_timeout": timedelta(seconds=3),
    "read_timeout": timedelta(seconds=10),
    # For a whole file. The read timeout finds connections that stand still.
    "timeout": timedelta(hours=1),
    # In addition to the machine's, of which there may be none.
    "root_certificate": Path(certifi.where()).read_bytes(),
}
SEND_TIMEOUT = timedelta(minutes=2)
"""Read timeout while files are sent. It begins with a part's first byte, not with its last, so that
slow connections need more than for reading."""
RETRIES: RetryConfig = {"max_retries": 2, "retry_timeout": 3 * SEND_TIMEOUT}
PART_BYTES = 8 << 20
"""Bytes of the parts in which a larger file is sent."""
PARTS_AT_ONCE = 2
"""Parts of a file that are sent at the same time."""


class ObjectAbsent(StoreUnavailable):
    """Error for an object that is not in the bucket."""


class Bucket:
    """Objects by key. Every method raises StoreUnavailable if the network or the server fails."""

    def __init__(self, open_store: Callable[[ClientConfig], ObjectStore]) -> None:
        self._store = open_store(CLIENT)
        self._sending = open_store({**CLIENT, "read_timeout": SEND_TIMEOUT})

    def read(self, key: str) -> bytes:
        """Returns an object's bytes. Raises ObjectAbsent."""
        return b"".join(self.chunks(key))

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yields an object's bytes. Raises ObjectAbsent."""
        with _translated_errors():
            yield from obstore.get(self._store, key)

    def size(self, key: str) -> int:
        """Returns an object's size in bytes. Raises ObjectAbsent."""
        with _translated_errors():
            return obstore.head(self._store, key)["size"]

    def write(self, key: str, content: bytes | Path) -> None:
        """Stores bytes, or a file's bytes."""
        store = self._sending if isinstance(content, Path) else self._store
        with _translated_errors():
            obstore.put(store, key, content, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def delete(self, key: str) -> None:
        """Removes an object if it exists."""
        with contextlib.suppress(ObjectAbsent), _translated_errors():
            obstore.delete(self._store, key)

    def list(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """Yields key and modification time of every object below a prefix, sorted by key."""
        with _translated_errors():
            for found in obstore.list(self._store, prefix):
                for one in found:
                    yield one["path"], one["last_modified"]

    def discard_uploads(self, prefix: str, before: datetime) -> None:
        """Removes the parts of uploads below a prefix that began before a time and did not end.
        Does nothing if only the server can remove them."""


def open_bucket(scheme: str, name: str) -> Bucket:
    """Opens the bucket of a location with the scheme `gs` or `az`. The environment says how it is
    reached, in the variables of Google's and Azure's own tools. Raises ValueError if one is missing
    or wrong."""
    store = GCSStore if scheme == "gs" else AzureStore
    try:
        return Bucket(lambda options: store(name, client_options=options, retry_config=RETRIES))
    except BaseError as error:
        raise ValueError(_summary(error)) from error


@contextlib.contextmanager
def _translated_errors() -> Generator[None]:
    """Converts obstore's errors to StoreUnavailable, and to ObjectAbsent if the bucket exists."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        text = _summary(error)
        status, code = re.search(r"status code: (\d+)", text), re.search(r"<Code>(\w+)", text)
        refusal = f"{(code or status)[1][:64]} (status {status[1]})" if status else ""
        is_absent = isinstance(error, FileNotFoundError) and not re.search(
            "NoSuchBucket|ContainerNotFound", refusal
        )
        kind = ObjectAbsent if is_absent else StoreUnavailable
        raise kind(f"the object store failed: {text}", refusal) from error


def _summary(error: Exception) -> str:
    """Returns the text of an error of obstore without its dump of the source."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())
