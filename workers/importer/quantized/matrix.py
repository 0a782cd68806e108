"""A matrix that several stored tensors describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.importer.quantized.source_tensors import SourceTensors


class QuantizedMatrix(NamedTuple):
    """A quantised matrix [N, K] of a source.

    parts: names of the stored tensors. read: dequantises them in float32.
    """

    parts: frozenset[str]
    read: Callable[[], NDArray[np.float32]]


FindMatrix = Callable[[str, tuple[int, int], SourceTensors], QuantizedMatrix | None]
"""Returns the matrix of a module (name, shape [N, K]), or None if the source does not store it
quantised. Raises ImportRefused if its tensors are not as the format has them."""
