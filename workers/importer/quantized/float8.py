"""Reads matrices in FP8 (E4M3) with one scale per matrix, row or block."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.importer.canonical import ImportRefused
from workers.importer.file_tensors import FLOATS
from workers.importer.quantized.matrix import FindMatrix, QuantizedMatrix
from workers.importer.quantized.source_tensors import SourceTensors

SCALES = ("weight_scale_inv", "weight_scale")
"""Possible names of the tensor that has a matrix's scales. DeepSeek and transformers use the first
name. With both names, a weight is its FP8 value times its scale, not divided by it."""


def open_float8(config: dict[str, Any]) -> FindMatrix:
    return partial(find_float8, block_sizes(config.get("weight_block_size"), "weight_block_size"))


def block_sizes(value: object, field: str) -> tuple[int, int] | None:
    """Returns the number of rows and columns of a block from a field of quantization_config, or
    None if the field is not set."""
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(size, int) and size > 0 for size in value)
    ):
        raise ImportRefused(f"quantization_config: {field} = {value!r} is no pair of sizes")
    return value[0], value[1]


def find_float8(
    block: tuple[int, int] | None, module: str, shape: tuple[int, int], tensors: SourceTensors
) -> QuantizedMatrix | None:
    name = f"{module}.weight"
    if not tensors.has_dtype(name, "F8_E4M3"):
        return None
    codes = tensors.require(name, shape, "F8_E4M3")
    rows, columns = shape
    block_rows, block_columns = block or shape
    grid = (-(-rows // block_rows), -(-columns // block_columns))
    allowed = [(), (1,), (1, 1), (rows,), (rows, 1), grid]
    scales_name = next((f"{module}.{each}" for each in SCALES if f"{module}.{each}" in tensors), "")
    if not scales_name:
        raise ImportRefused(f"tensor {module}.{SCALES[1]} is missing")
    scales = tensors.require(scales_name, allowed, *FLOATS, "F8_E8M0")

    def read() -> NDArray[np.float32]:
        factors = scales.read_floats()
        if factors.shape == grid:
            factors = factors.repeat(block_rows, 0)[:rows].repeat(block_columns, 1)[:, :columns]
        elif factors.size > 1:
            factors = factors.reshape(rows, 1)
        return codes.read_floats() * factors

    return QuantizedMatrix(frozenset([name, scales_name]), read)
