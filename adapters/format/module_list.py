"""List of the modules that an adapter changes, stored with the adapter's two files. Torch-free.

The list is made once, when the adapter is uploaded, so that workers match no untrusted patterns. It
depends only on the files, so adapters with equal content have equal lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from adapters.errors import AdapterRejected

MODULES_NAME = "modules.json"
MAX_BYTES = 1 << 20


class ListedModule(msgspec.Struct, frozen=True, array_like=True):
    """Module that an adapter changes. projection: index of the module in
    `BaseModelShape.modules(layer)`. scale: factor of the product B A."""

    layer: int
    projection: int
    scale: float


_decoder = msgspec.json.Decoder(list[ListedModule])


def write_module_list(folder: Path, modules: Sequence[ListedModule]) -> None:
    (folder / MODULES_NAME).write_bytes(msgspec.json.encode(list(modules)))


def read_module_list(folder: Path) -> list[ListedModule]:
    """Returns the stored list. Raises AdapterRejected if it is missing, damaged or too large."""
    try:
        with (folder / MODULES_NAME).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return _decoder.decode(raw)
    except FileNotFoundError as error:
        # Tenants read the message, so it must not contain the path of the store.
        raise AdapterRejected("adapter.store.modules", MODULES_NAME) from error
    except ValueError as error:  # base class of msgspec's errors
        raise AdapterRejected("adapter.store.modules", MODULES_NAME, str(error)) from error
