"""Quantised matrix that a checkpoint stores as several tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from workers.importer.quantized.grouped_integers import GroupedIntegers
from workers.importer.quantized.source_tensors import SourceTensors


class QuantizedMatrix(NamedTuple):
    """Quantised matrix [N, K] of a source.

    parts: names of the stored tensors. read: function that dequantises the matrix to float32.
    read_integers: function that reads the matrix as integers with scales, or None if the matrix is
    stored in another form.
    """

    parts: frozenset[str]
    read: Callable[[], NDArray[np.float32]]
    read_integers: Callable[[], GroupedIntegers] | None = None

    @classmethod
    def of_integers(cls, parts: frozenset[str], read: Callable[[], GroupedIntegers]) -> Self:
        return cls(parts, lambda: read().values(), read)


FindMatrix = Callable[[str, tuple[int, int], SourceTensors], QuantizedMatrix | None]
"""Function that returns a module's quantised matrix, or None if the source does not store this
matrix quantised. Its arguments are the module's name, the matrix's shape [N, K] and the source's
tensors. Raises ImportRefused if the tensors do not match the format."""
