"""The list of the modules that an adapter touches, stored with its two files. Torch-free.

It is made once, when an adapter is uploaded, so that workers match no pattern of a stranger. The
files alone decide it, so adapters of equal content have equal lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from adapters.errors import AdapterRejected

MODULES_NAME = "modules.json"
MAX_BYTES = 1 << 20


class ListedModule(msgspec.Struct, frozen=True, array_like=True):
    """An adapted module: its layer, its index in `BaseModelShape.modules(layer)`, and the factor of
    its product."""

    layer: int
    projection: int
    scale: float


_decoder = msgspec.json.Decoder(list[ListedModule])


def write_module_list(folder: Path, modules: Sequence[ListedModule]) -> None:
    (folder / MODULES_NAME).write_bytes(msgspec.json.encode(list(modules)))


def read_module_list(folder: Path) -> list[ListedModule] | None:
    """Returns the list, or None for an adapter that was stored before lists were.

    Raises AdapterRejected if it cannot be read as one.
    """
    try:
        with (folder / MODULES_NAME).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        if len(raw) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return _decoder.decode(raw)
    except ValueError as error:  # as all of msgspec's
        raise AdapterRejected("adapter.store.modules", MODULES_NAME, str(error)) from error
