"""Reads matrices of the compressed-tensors format (llm-compressor). They may be FP8, packed
integers, or integers of one byte each."""

from __future__ import annotations

from functools import partial
from typing import Any

from numpy.typing import NDArray

from workers.importer.canonical import ImportRefused
from workers.importer.file_tensors import FLOATS
from workers.importer.quantized.float8 import block_sizes, find_float8
from workers.importer.quantized.grouped_integers import GroupedIntegers
from workers.importer.quantized.groups import group_size, read_groups
from workers.importer.quantized.matrix import FindMatrix, QuantizedMatrix
from workers.importer.quantized.packed_integers import unpack
from workers.importer.quantized.source_tensors import SourceTensors

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
BITS = (4, 8)
"""Supported numbers of bits of a packed integer. Versions of the library differ in how they pack
integers of other sizes."""


def open_compressed_tensors(config: dict[str, Any]) -> FindMatrix:
    """Returns the function that finds the quantised matrices of a checkpoint. Raises ImportRefused
    if the config has an unsupported format, transform or sparsity."""
    groups = [each for each in (config.get("config_groups") or {}).values() if each]
    formats = [group.get("format") for group in groups] + [config.get("format")]
    for format in formats:
        if format not in (None, "mixed-precision", *FORMATS):
            raise ImportRefused(
                f"quantization_config: format {format!r} is not supported; "
                f"allowed: {', '.join(FORMATS)}"
            )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ImportRefused(
            "quantization_config.transform_config: weights that were rotated are not supported"
        )
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ImportRefused(
            f"quantization_config.sparsity_config: format {sparsity!r} is not supported; "
            "allowed: dense"
        )
    weights = [each for group in groups if (each := group.get("weights"))]
    block = block_sizes(_only(weights, "block_structure"), "block_structure")
    return partial(_find, block, _only(weights, "group_size"))


def _only(weights: list[dict[str, Any]], field: str) -> object:
    """Returns the value of a field that must be the same in all groups of the config, or None if no
    group has the field. Raises ImportRefused if the value differs between groups."""
    values = [value for each in weights if (value := each.get(field)) is not None]
    if any(value != values[0] for value in values):
        raise ImportRefused(
            f"quantization_config: {field} differs between groups ({values}); "
            "allowed: one value for the model"
        )
    return values[0] if values else None


def _find(
    block: tuple[int, int] | None,
    asked_group: object,
    module: str,
    shape: tuple[int, int],
    tensors: SourceTensors,
) -> QuantizedMatrix | None:
    if f"{module}.weight_packed" in tensors:
        return _packed(asked_group, module, shape, tensors)
    if tensors.has_dtype(f"{module}.weight", "I8"):
        return _whole(asked_group, module, shape, tensors)
    return find_float8(block, module, shape, tensors)


def _packed(
    asked_group: object, module: str, shape: tuple[int, int], tensors: SourceTensors
) -> QuantizedMatrix:
    words, zero_words = f"{module}.weight_packed", f"{module}.weight_zero_point"
    rows, columns = shape
    num_words = tensors[words].shape[-1]
    bits = next((each for each in BITS if -(-columns * each // 32) == num_words), None)
    if bits is None:
        raise ImportRefused(
            f"tensor {words} of shape {tensors[words].shape} has not {columns} columns "
            f"of {', '.join(map(str, BITS))} bits"
        )
    tensors.require(words, (rows, num_words), "I32")
    num_groups = _num_groups(asked_group, module, shape, tensors)
    if zero_words in tensors:
        tensors.require(zero_words, (-(-rows * bits // 32), num_groups), "I32")

    def read() -> GroupedIntegers:
        codes = unpack(tensors[words].read(), bits, columns)
        zeros = 1 << (bits - 1)
        if zero_words in tensors:
            zeros = unpack(tensors[zero_words].read().T, bits, rows).T
        return _grouped(codes, zeros, asked_group, module, tensors)

    parts = {words, f"{module}.weight_scale", f"{module}.weight_shape", zero_words}
    return QuantizedMatrix.of_integers(_present(parts, module, tensors), read)


def _whole(
    asked_group: object, module: str, shape: tuple[int, int], tensors: SourceTensors
) -> QuantizedMatrix:
    name, zero_name = f"{module}.weight", f"{module}.weight_zero_point"
    tensors.require(name, shape, "I8")
    num_groups = _num_groups(asked_group, module, shape, tensors)
    if zero_name in tensors:
        tensors.require(zero_name, (shape[0], num_groups), "I8")

    def read() -> GroupedIntegers:
        zeros = tensors[zero_name].read() if zero_name in tensors else 0
        return _grouped(tensors[name].read(), zeros, asked_group, module, tensors)

    parts = {name, f"{module}.weight_scale", zero_name}
    return QuantizedMatrix.of_integers(_present(parts, module, tensors), read)


def _num_groups(
    asked_group: object, module: str, shape: tuple[int, int], tensors: SourceTensors
) -> int:
    """Checks the scales and groups of a matrix. Returns the number of groups in a row."""
    scales, order = f"{module}.weight_scale", f"{module}.weight_g_idx"
    num_groups = tensors[scales].shape[-1]
    tensors.require(scales, (shape[0], num_groups), *FLOATS)
    if order in tensors:
        tensors.require(order, (shape[1],), "I32")
    else:
        group_size(shape[1], num_groups, asked_group)
    return num_groups


def _grouped(
    codes: NDArray[Any],
    zeros: NDArray[Any] | int,
    asked_group: object,
    module: str,
    tensors: SourceTensors,
) -> GroupedIntegers:
    scales = tensors[f"{module}.weight_scale"].read_floats()
    columns, num_groups = codes.shape[1], scales.shape[1]
    groups = read_groups(tensors, f"{module}.weight_g_idx", columns, num_groups, asked_group)
    return GroupedIntegers(codes, zeros, scales, groups)


def _present(names: set[str], module: str, tensors: SourceTensors) -> frozenset[str]:
    return frozenset(name for name in names | {f"{module}.weight_g_idx"} if name in tensors)
