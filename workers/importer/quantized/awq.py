"""Reads matrices in AWQ's packed layout, as AutoAWQ and GPTQModel write them.

A matrix [N, K] with G groups of columns is stored as qweight [K, N / 8], qzeros [G, N / 8] and
scales [G, N]. Each 32-bit word has eight integers of 4 bits in the order `ORDER`.
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

BITS = 4
PER_WORD = 32 // BITS
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Order of the eight entries of a row that share a 32-bit word. ORDER[n] is the position of the nth
entry in the word. Position 0 has the lowest bits."""


def open_awq(config: dict[str, Any]) -> FindMatrix:
    bits = config.get("bits", config.get("w_bit", BITS))
    if bits != BITS:
        raise ImportRefused(f"quantization_config.bits = {bits!r} is not supported; allowed: 4")
    layout = config.get("checkpoint_format") or config.get("format") or config.get("version")
    if (layout or "gemm").lower() != "gemm":
        raise ImportRefused(
            f"quantization_config.version = {layout!r} is not supported; allowed: gemm"
        )
    return partial(_find, config.get("group_size", config.get("q_group_size")))


def _find(
    asked_group: object, module: str, shape: tuple[int, int], tensors: SourceTensors
) -> QuantizedMatrix | None:
    words = f"{module}.qweight"
    if words not in tensors:
        return None
    rows, columns = shape
    num_groups = tensors[f"{module}.scales"].shape[0]
    tensors.require(words, (columns, rows // PER_WORD), "I32")
    tensors.require(f"{module}.scales", (num_groups, rows), *FLOATS)
    tensors.require(f"{module}.qzeros", (num_groups, rows // PER_WORD), "I32")
    group_size(columns, num_groups, asked_group)

    def read() -> GroupedIntegers:
        codes = _unpack(tensors[words].read(), rows)
        zeros = _unpack(tensors[f"{module}.qzeros"].read(), rows)
        scales = tensors[f"{module}.scales"].read_floats()
        groups = read_groups(tensors, f"{module}.g_idx", columns, num_groups, asked_group)
        return GroupedIntegers(codes.T, zeros.T, scales.T, groups)

    return QuantizedMatrix.of_integers(
        frozenset([words, f"{module}.qzeros", f"{module}.scales"]), read
    )


def _unpack(words: NDArray[np.int32], count: int) -> NDArray[np.uint8]:
    codes = unpack(words, BITS, count)
    return codes.reshape(len(words), -1, PER_WORD)[:, :, ORDER].reshape(len(words), count)
