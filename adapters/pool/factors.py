"""Factors of an adapter as stored in its files, for comparison with a packed image."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from adapters.format.binding import AdapterTensors, BaseCopy
from adapters.format.validator import AdapterFiles, read_adapter
from adapters.manifest import BaseModelShape
from adapters.pool.lora import read_factors, read_replaced, read_rows

COPY_BYTES = 16 << 20


class Factors:
    """Reader of an adapter's factors. Raises AdapterRejected unless the files fit the base."""

    def __init__(self, files: AdapterFiles, base: BaseModelShape) -> None:
        adapter = read_adapter(files, base)
        self._weights = files.weights
        self._base = base
        self._data_start = adapter.header.data_start
        self._modules = {(module.layer, module.projection): module for module in adapter.modules}
        self._rows = {bound.module: bound for bound in adapter.rows}
        self.copies: tuple[BaseCopy, ...] = AdapterTensors(adapter.header.tensors, base).copies()
        """Copies of base model weights in the adapter's file."""

    def read(self, layer: int, projection: int) -> tuple[Tensor, Tensor] | None:
        """Returns A [rank, in] and scaled B [out, rank] as float32, as `read_factors` does. Returns
        None if the adapter does not change the projection. Raises OSError."""
        module = self._modules.get((layer, projection))
        if module is None:
            return None
        with self._weights.open("rb") as file:
            return read_factors(file, self._data_start, module, self._base)

    def read_rows(self, module: int, first: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Returns the token ids and the rows that replace rows of the table `module` for the tokens
        first..end - 1, as `read_replaced` does. Returns None if there are none. Raises OSError."""
        bound = self._rows.get(module)
        if bound is None:
            return None
        with self._weights.open("rb") as file:
            return read_replaced(file, self._data_start, bound, first, end)

    def are_zero(self) -> bool:
        """Returns whether the adapter adds nothing to any module. Raises OSError."""
        found = (self.read(layer, projection) for layer, projection in self._modules)
        return not any(bool(a.any() and b.any()) for a, b in filter(None, found))

    def read_copy(self, copy: BaseCopy) -> Iterator[tuple[int, Tensor]]:
        """Yields the rows of a copied base model weight in parts of up to about `COPY_BYTES` bytes:
        the number of the part's first row, and its rows in the file's dtype. Raises OSError."""
        num_rows, width = copy.entry.shape
        step = max(COPY_BYTES // (4 * width), 1)
        with self._weights.open("rb") as file:
            for first in range(0, num_rows, step):
                end = min(first + step, num_rows)
                yield first, read_rows(file, self._data_start, copy.entry, first, end)
