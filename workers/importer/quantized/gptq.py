"""Reads matrices in GPTQ's packed layout, as AutoGPTQ and GPTQModel write them.

A matrix [N, K] with G groups of columns is stored as qweight [K * bits / 32, N], qzeros [G, N *
bits / 32] and scales [G, N]. If the columns were ordered by their activations, g_idx [K] has the
group of each column.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.importer.canonical import ImportRefused
from workers.importer.file_tensors import FLOATS
from workers.importer.quantized.grouped_integers import GroupedIntegers
from workers.importer.quantized.groups import group_size, read_groups
from workers.importer.quantized.matrix import FindMatrix, QuantizedMatrix
from workers.importer.quantized.packed_integers import unpack
from workers.importer.quantized.source_tensors import SourceTensors

BITS = (2, 3, 4, 8)
LAYOUTS = ("gptq", "gptq_v2")


def open_gptq(config: dict[str, Any]) -> FindMatrix:
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in LAYOUTS:
        raise ImportRefused(
            f"quantization_config.checkpoint_format = {layout!r} is not supported; "
            f"allowed: {', '.join(LAYOUTS)}"
        )
    return partial(_find, layout == "gptq", config.get("group_size"))


def _find(
    is_first_layout: bool,
    asked_group: object,
    module: str,
    shape: tuple[int, int],
    tensors: SourceTensors,
) -> QuantizedMatrix | None:
    words = f"{module}.qweight"
    if words not in tensors:
        return None
    rows, columns = shape
    bits, rest = divmod(32 * tensors[words].shape[0], columns)
    if rest or bits not in BITS:
        raise ImportRefused(
            f"tensor {words} of shape {tensors[words].shape} has not {columns} columns "
            f"of {', '.join(map(str, BITS))} bits"
        )
    tensors.require(words, (columns * bits // 32, rows), "I32")
    num_groups = tensors[f"{module}.scales"].shape[0]
    tensors.require(f"{module}.scales", (num_groups, rows), *FLOATS)
    tensors.require(f"{module}.qzeros", (num_groups, -(-rows * bits // 32)), "I32")
    order = f"{module}.g_idx"
    if order in tensors:
        tensors.require(order, (columns,), "I32")
    else:
        group_size(columns, num_groups, asked_group)

    def read() -> GroupedIntegers:
        codes = unpack(tensors[words].read().T, bits, columns)
        zeros = _zeros(tensors[f"{module}.qzeros"].read(), bits, rows, is_first_layout)
        scales = tensors[f"{module}.scales"].read_floats()
        groups = read_groups(tensors, order, columns, num_groups, asked_group)
        return GroupedIntegers(codes, zeros.T, scales.T, groups)

    parts = [words, f"{module}.qzeros", f"{module}.scales", order]
    return QuantizedMatrix.of_integers(frozenset(name for name in parts if name in tensors), read)


def _zeros(
    words: NDArray[np.int32], bits: int, count: int, is_first_layout: bool
) -> NDArray[np.uint8]:
    """Returns the zero points. The first layout (`gptq`) stores zero points minus 1, so this
    function adds 1 to each. If `bits` divides 32, it adds to the packed 32-bit words. Otherwise it
    adds to each unpacked integer. The libraries that write the layout subtract in the same way."""
    if is_first_layout and 32 % bits == 0:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (words.view(np.uint32) + np.uint32(ones)).view(np.int32)
    zeros = unpack(words, bits, count)
    if is_first_layout and 32 % bits:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return zeros
