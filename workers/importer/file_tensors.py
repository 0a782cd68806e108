"""Reads tensors of safetensors files one at a time, without torch."""

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
    explain_missing,
    weight_files,
)
from workers.models.spec import ModelSpec

FLOATS = ("F32", "F16", "BF16")
"""safetensors types of weights that are not quantised."""
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
"""numpy type of the array into which each safetensors type is read. bfloat16 and FP8 are read as
unsigned integers with the same bits, because numpy has neither type."""


def _float8_values() -> NDArray[np.float32]:
    """Returns the values of the 256 codes of F8_E4M3, which has 4 exponent bits, 3 mantissa bits
    and no infinity."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


FLOAT8_VALUES = _float8_values()


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Location of a tensor in a safetensors file, its shape, and its safetensors type.

    order: for each row that `read` returns, the index of the stored row. If it is None, `read`
    returns the rows in the order in which they are stored.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    order: list[int] | None = None

    def rows(self, first: int, count: int, order: list[int] | None) -> FileTensor:
        """Returns the part of this tensor that has `count` rows, starting at row `first`. order:
        for each row that `read` returns, the index of the stored row among these `count` rows. If
        it is None, `read` returns the rows in the order in which they are stored."""
        row_bytes = math.prod(self.shape[1:]) * np.dtype(NUMPY_TYPES[self.dtype]).itemsize
        shape = (count, *self.shape[1:])
        return replace(self, offset=self.offset + first * row_bytes, shape=shape, order=order)

    def read(self) -> NDArray[Any]:
        """Reads the numbers in the stored type. Returns bfloat16 and FP8 numbers as unsigned
        integers with the same bits."""
        count = math.prod(self.shape)
        raw: NDArray[Any] = np.fromfile(
            self.path, NUMPY_TYPES[self.dtype], count, offset=self.offset
        )
        raw = raw.reshape(self.shape)
        return raw if self.order is None else raw[self.order]

    def read_floats(self) -> NDArray[np.float32]:
        """Reads the values of the tensor as float32."""
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
    """Returns the tensors in the weight files of a source folder, by canonical name. Leaves out
    tensors whose canonical names begin with one of the prefixes `others`.

    Raises CheckpointError if a file is damaged or a tensor is stored twice, and ImportRefused if
    the type of a tensor is not among `dtypes`.
    """
    tensors: dict[str, FileTensor] = {}
    for path in weight_files(source):
        try:
            with safe_open(path, framework="np"):
                pass  # safe_open checks that every tensor is within the file
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
    """Raises CheckpointError if a tensor of the spec is missing or has another shape, or if there
    is a tensor that is not in the spec. Additional rotary frequencies are allowed."""
    expected = dict(expected_tensors(spec))
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(explain_missing(name))
        if (got := tensors[name].shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {got}, config.json says {shape}")
    for name in tensors.keys() - expected.keys():
        if not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(f"tensor {name} belongs to no module of {spec.model_type}")
