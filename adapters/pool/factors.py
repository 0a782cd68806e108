"""Factors of an adapter as stored in its files, for comparison with a packed image."""

from __future__ import annotations

from torch import Tensor

from adapters.format.validator import AdapterFiles, read_adapter
from adapters.manifest import BaseModelShape
from adapters.pool.lora import read_factors
from adapters.pool.stored_modules import stored_modules


class Factors:
    """Reader of the factors. Raises AdapterRejected unless the files fit the base."""

    def __init__(self, files: AdapterFiles, base: BaseModelShape) -> None:
        modules, header = read_adapter(files, base, stored_modules(files, base))
        self._weights = files.weights
        self._base = base
        self._data_start = header.data_start
        self._modules = {(module.layer, module.projection): module for module in modules}

    def read(self, layer: int, projection: int) -> tuple[Tensor, Tensor] | None:
        """Returns the factors as `read_factors` does, or None if the adapter does not touch the
        projection. Raises OSError."""
        module = self._modules.get((layer, projection))
        if module is None:
            return None
        with self._weights.open("rb") as file:
            return read_factors(file, self._data_start, module, self._base)
