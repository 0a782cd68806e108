"""Tensors of safetensors files, read one at a time without torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from workers.importer.canonical import ImportRefused
from workers.importer.safetensors_file import read_header
from workers.importer.weight_formats import widened
from workers.models.checkpoint import (
    CheckpointError,
    canonical_name,
    expected_tensors,
    weight_files,
)
from workers.models.spec import ModelSpec

FLOATS = ("F32", "F16", "BF16")
"""Types of weights that are not quantised."""
NUMPY_TYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}
"""How numpy reads the bits of each type. It knows no bfloat16 and no FP8."""


def _float8_values() -> NDArray[np.float32]:
    """Returns the value of each code of F8_E4M3: 4 bits of exponent, 3 of mantissa, no infinity."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


FLOAT8_VALUES = _float8_values()


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a tensor of the source lies, its shape and its type as safetensors calls it.

    order: the stored row for each row, if they are to be read in another order.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    order: list[int] | None = None

    def rows(self, first: int, count: int, order: list[int] | None) -> FileTensor:
        """Returns `count` of the rows as a tensor, to be read in the given order."""
        row_bytes = math.prod(self.shape[1:]) * np.dtype(NUMPY_TYPES[self.dtype]).itemsize
        shape = (count, *self.shape[1:])
        return replace(self, offset=self.offset + first * row_bytes, shape=shape, order=order)

    def read(self) -> NDArray[Any]:
        """Reads the numbers as they are; bfloat16 and FP8 come as their bits."""
        count = math.prod(self.shape)
        raw: NDArray[Any] = np.fromfile(
            self.path, NUMPY_TYPES[self.dtype], count, offset=self.offset
        )
        raw = raw.reshape(self.shape)
        return raw if self.order is None else raw[self.order]

    def read_floats(self) -> NDArray[np.float32]:
        """Reads the values of a tensor of floats."""
        raw = self.read()
        match self.dtype:
            case "BF16":
                return widened(raw)
            case "F8_E4M3":
                return FLOAT8_VALUES[raw]
            case "F8_E8M0":
                return np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
            case _:
                return raw.astype(np.float32)


def file_tensors(
    source: Path, others: tuple[str, ...], dtypes: Collection[str] = FLOATS
) -> dict[str, FileTensor]:
    """Returns the language model's tensors by canonical name, all but those whose names begin as
    one of `others` does.

    Raises CheckpointError if a file is damaged, and ImportRefused if a tensor has another type, as
    one in blocks has.
    """
    tensors: dict[str, FileTensor] = {}
    for path in weight_files(source):
        try:
            with safe_open(path, framework="np"):
                pass  # it checks that every tensor lies within the file
        except SafetensorError as error:
            raise CheckpointError(f"{path.name}: {error}") from error
        header, begin = read_header(path)
        header.pop("__metadata__", None)
        for stored, entry in sorted(header.items()):
            name, dtype = canonical_name(stored), entry["dtype"]
            if name.startswith(others):
                continue
            if dtype not in dtypes:
                raise ImportRefused(f"tensor {stored} is {dtype}; allowed: {', '.join(dtypes)}")
            if name in tensors:
                raise CheckpointError(f"tensor {stored} is there twice, as {name}")
            offset = begin + entry["data_offsets"][0]
            tensors[name] = FileTensor(path, offset, tuple(entry["shape"]), dtype)
    return tensors


def check_tensors(tensors: dict[str, FileTensor], spec: ModelSpec) -> None:
    """Raises CheckpointError unless all tensors of the spec are there and no others."""
    expected = dict(expected_tensors(spec))
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing")
        if (got := tensors[name].shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {got}, config.json says {shape}")
    for name in tensors.keys() - expected.keys():
        if name != "lm_head.weight":
            raise CheckpointError(f"tensor {name} belongs to no module of {spec.model_type}")
