"""In which format the matrices of an imported model are stored."""

from __future__ import annotations

from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from ops.weight_format import BLOCK_SIZES, WeightFormat
from workers.importer.safetensors_file import BFloat16, Blocks

ImportFormat = Literal["bfloat16", "keep", "int8", "int4"]
"""bfloat16: a GGUF file is dequantised, and Hugging Face's weights are stored as they are. keep:
each matrix stays in its own format if it can be served so. int8, int4: matrices are quantised."""
INTO: dict[str, WeightFormat] = {"int8": WeightFormat.Q8_0, "int4": WeightFormat.Q4_0}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def target_format(name: str, shape: tuple[int, ...], asked: ImportFormat) -> WeightFormat | None:
    """Returns the block format into which a tensor is quantised, or None if it stays as it is.

    Embedding and output matrix become 8-bit at most, because every token passes through them. A
    matrix whose rows are not whole blocks stays as it is.
    """
    if len(shape) != 2 or asked not in INTO:
        return None
    format = WeightFormat.Q8_0 if name in TABLES else INTO[asked]
    return format if shape[1] % BLOCK_SIZES[format].block == 0 else None


def widened(rounded: BFloat16) -> NDArray[np.float32]:
    return (rounded.astype(np.uint32) << 16).view(np.float32)


def quantized(exact: NDArray[np.float32], format: WeightFormat) -> Blocks:
    """Returns a matrix in blocks, rounded as ggml does."""
    return quantize(exact, GGMLQuantizationType[format.name])


def block_shape(shape: tuple[int, ...], format: WeightFormat) -> tuple[int, int]:
    """Returns the bytes [N, blocks of a row] of a matrix [N, K]."""
    sizes = BLOCK_SIZES[format]
    return shape[0], shape[1] // sizes.block * sizes.block_bytes
