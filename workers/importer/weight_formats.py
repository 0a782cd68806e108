"""Storage formats of the matrices of an imported model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from ops.weight_format import BLOCK_SIZES, WeightFormat
from workers.importer.safetensors_file import BFloat16, Blocks

ImportFormat = Literal["bfloat16", "keep", "int8", "int4"]
"""Requested format of weights.

- bfloat16: quantised matrices are dequantised to bfloat16. Other Hugging Face weights are stored
  unchanged.
- keep: a quantised matrix stays quantised if the import can store it without loss in a block format
  that workers serve. All other weights are stored as with bfloat16.
- int8, int4: matrices are quantised to 8 or 4 bits.
"""
INTO: dict[str, WeightFormat] = {"int8": WeightFormat.Q8_0, "int4": WeightFormat.Q4_0}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class ImportFormats(NamedTuple):
    """Formats of a model's matrices. tables: format of the embedding and the output matrix. If it
    is None, these two matrices have the format of the layers, or int8 if the layers have int4,
    because every token passes through these two matrices."""

    layers: ImportFormat = "bfloat16"
    tables: ImportFormat | None = None

    @property
    def quantise(self) -> bool:
        return not INTO.keys().isdisjoint(self)

    def of(self, name: str) -> ImportFormat:
        if name not in TABLES:
            return self.layers
        return self.tables or ("int8" if self.layers == "int4" else self.layers)

    def target(self, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
        """Returns the block format into which a tensor is quantised, or None if it is not
        quantised. A vector is not quantised, nor is a matrix whose row length is not a multiple of
        the block size."""
        format = INTO.get(self.of(name))
        if format is None or len(shape) != 2 or shape[1] % BLOCK_SIZES[format].block:
            return None
        return format


def widened(rounded: BFloat16) -> NDArray[np.float32]:
    return (rounded.astype(np.uint32) << 16).view(np.float32)


def quantized(exact: NDArray[np.float32], format: WeightFormat) -> Blocks:
    """Quantises a matrix to blocks of the format, with the same rounding as ggml."""
    return quantize(exact, GGMLQuantizationType[format.name])


def block_shape(shape: tuple[int, ...], format: WeightFormat) -> tuple[int, int]:
    """Returns the shape [N, bytes of a row] with which a matrix [N, K] is stored in blocks."""
    sizes = BLOCK_SIZES[format]
    return shape[0], shape[1] // sizes.block * sizes.block_bytes
