"""A matrix that several stored tensors describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from workers.importer.quantized.grouped_integers import GroupedIntegers
from workers.importer.quantized.source_tensors import SourceTensors


class QuantizedMatrix(NamedTuple):
    """A quantised matrix [N, K] of a source.

    parts: names of the stored tensors. read: dequantises them in float32. read_integers: reads them
    as integers with scales; None if the format has none.
    """

    parts: frozenset[str]
    read: Callable[[], NDArray[np.float32]]
    read_integers: Callable[[], GroupedIntegers] | None = None

    @classmethod
    def of_integers(cls, parts: frozenset[str], read: Callable[[], GroupedIntegers]) -> Self:
        return cls(parts, lambda: read().values(), read)


FindMatrix = Callable[[str, tuple[int, int], SourceTensors], QuantizedMatrix | None]
"""Returns the matrix of a module (name, shape [N, K]), or None if the source does not store it
quantised. Raises ImportRefused if its tensors are not as the format has them."""
