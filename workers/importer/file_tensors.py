"""Tensors of safetensors files, read one at a time without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

WIDENED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Types of weights, as numpy reads them."""


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
        row_bytes = math.prod(self.shape[1:]) * np.dtype(WIDENED[self.dtype]).itemsize
        shape = (count, *self.shape[1:])
        return replace(self, offset=self.offset + first * row_bytes, shape=shape, order=order)

    def read(self) -> NDArray[Any]:
        """Reads the numbers as they are; bfloat16 comes as its bits."""
        count = math.prod(self.shape)
        raw: NDArray[Any] = np.fromfile(self.path, WIDENED[self.dtype], count, offset=self.offset)
        raw = raw.reshape(self.shape)
        return raw if self.order is None else raw[self.order]

    def read_floats(self) -> NDArray[np.float32]:
        raw = self.read()
        return widened(raw) if self.dtype == "BF16" else raw.astype(np.float32)


def file_tensors(source: Path, others: tuple[str, ...]) -> dict[str, FileTensor]:
    """Returns the language model's tensors, all but those whose canonical names begin as one of
    `others` does. Raises ImportRefused if one is in blocks or another type that is no float."""
    tensors: dict[str, FileTensor] = {}
    for path in weight_files(source):
        header, begin = read_header(path)
        header.pop("__metadata__", None)
        for stored, entry in sorted(header.items()):
            name, dtype = canonical_name(stored), entry["dtype"]
            if name.startswith(others):
                continue
            if dtype not in WIDENED:
                raise ImportRefused(f"tensor {stored} is {dtype}; allowed: {', '.join(WIDENED)}")
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
