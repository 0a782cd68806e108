"""Reads the tensors of a quantised source as ordinary, dequantised tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from workers.importer.canonical import ImportRefused
from workers.importer.file_tensors import FLOATS
from workers.importer.gguf_tensors import to_bfloat16
from workers.importer.quantized.grouped_integers import GroupedIntegers
from workers.importer.quantized.matrix import FindMatrix
from workers.importer.quantized.source_tensors import SourceTensors
from workers.importer.safetensors_file import BFloat16
from workers.models.checkpoint import expected_tensors
from workers.models.spec import ModelSpec

ACTIVATION_SCALES = (
    ".activation_scale",
    ".input_scale",
    ".input_zero_point",
    ".k_scale",
    ".output_scale",
    ".output_zero_point",
    ".v_scale",
)
"""Suffixes of the names of tensors that have scales or zero points of activations. These tensors
are ignored, because workers do not quantise activations."""


@dataclass(frozen=True, slots=True)
class DequantizedTensor:
    """Tensor of a quantised source, read as bfloat16 (`read`) or float32 (`read_floats`)."""

    dtype: ClassVar[str] = "BF16"

    shape: tuple[int, ...]
    read_floats: Callable[[], NDArray[np.float32]]
    read_integers: Callable[[], GroupedIntegers] | None = None
    """Function that reads the matrix as integers with scales. None if the tensor is not stored in
    this form."""

    def read(self) -> BFloat16:
        return to_bfloat16(self.read_floats())


def dequantized_tensors(
    tensors: SourceTensors, spec: ModelSpec, find: FindMatrix
) -> dict[str, DequantizedTensor]:
    """Returns all tensors of the model, which are dequantised when they are read.

    Raises ImportRefused if the source lacks a tensor of the spec, or has an additional tensor that
    may change the model's results.
    """
    found: dict[str, DequantizedTensor] = {}
    unused = set(tensors)
    for name, shape in expected_tensors(spec):
        matrix = None
        if len(shape) == 2:
            matrix = find(name.removesuffix(".weight"), (shape[0], shape[1]), tensors)
        if matrix is not None:
            unused -= matrix.parts
            found[name] = DequantizedTensor(shape, matrix.read, matrix.read_integers)
        else:
            tensor = tensors.require(name, shape, *FLOATS)
            unused.discard(name)
            found[name] = DequantizedTensor(shape, tensor.read_floats)
    for name in sorted(unused):
        if not _is_spare(tensors, name):
            raise ImportRefused(f"tensor {name} belongs to no module of {spec.model_type}")
    return found


def _is_spare(tensors: SourceTensors, name: str) -> bool:
    """Returns whether the tensor can be ignored, because the model's results do not depend on it.

    For example, AutoGPTQ stores a bias of zeros with every matrix.
    """
    if name.endswith(("rotary_emb.inv_freq", *ACTIVATION_SCALES)):
        return True
    return (
        name.endswith(".bias")
        and name.removesuffix("bias") + "qweight" in tensors
        and tensors[name].dtype in FLOATS
        and not tensors[name].read().any()
    )
