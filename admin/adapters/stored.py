"""Checks an adapter's files in the store."""

from __future__ import annotations

from typing import Literal

import msgspec

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME, digest_chunks
from adapters.store.folder import NotInStore, Store, StoreUnavailable

FILES = {CONFIG_NAME, WEIGHTS_NAME}


class StoredContent(msgspec.Struct, frozen=True):
    state: Literal["present", "intact", "missing", "damaged", "unknown"]
    """`present` means that the files have the right size, `intact` that every byte was read and is
    right, and `unknown` that the store does not answer."""
    detail: str = ""


def inspect(store: Store, digest: str, file_bytes: int, *, every_byte: bool) -> StoredContent:
    """Returns the state of an adapter's files in the store. Compares their total size with
    `file_bytes`. If `every_byte` is set, also reads them and compares their digest."""
    try:
        sizes = store.adapter_sizes(digest)
        if missing := sorted(FILES - sizes.keys()):
            return StoredContent("missing", f"the store has no {missing[0]} of it")
        if (found := sum(sizes[name] for name in FILES)) != file_bytes:
            return StoredContent("damaged", f"{found} bytes are stored of {file_bytes}")
        if not every_byte:
            return StoredContent("present")
        config = b"".join(store.adapter_chunks(digest, CONFIG_NAME))
        weights = store.adapter_chunks(digest, WEIGHTS_NAME)
        read = digest_chunks(config, weights, sizes[WEIGHTS_NAME])
    except (NotInStore, FileNotFoundError):
        return StoredContent("missing", "the store does not have it")
    except StoreUnavailable as error:
        return StoredContent("unknown", f"the store {error.reason}")
    except OSError as error:
        return StoredContent("damaged", f"it cannot be read: {error.strerror}")
    if read != digest:
        return StoredContent("damaged", f"its SHA-256 is {read}")
    return StoredContent("intact")
