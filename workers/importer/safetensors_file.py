"""Writes a safetensors file tensor by tensor, so that memory never holds the whole model.

The format is described in https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.models.progress import ByteProgress, ProgressMeter

BFloat16 = NDArray[np.uint16]
"""Array of bfloat16 numbers, each stored as its 16 bits, because numpy has no bfloat16 type."""
Blocks = NDArray[np.uint8]
"""Array of the bytes of a matrix in quantised blocks (see `ops.block_matrix`). Each row of the
array has the bytes of one row of the matrix."""
DTYPES = {
    np.dtype(np.uint16): "BF16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
}
ALIGNMENT = 64


class StoredTensor(NamedTuple):
    """Tensor that will be written to a file. read: function that returns the tensor's content."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]


def write_safetensors(
    path: Path,
    tensors: dict[str, StoredTensor],
    check_room: Callable[[int], None],
    progress: ByteProgress | None,
) -> None:
    """Writes the tensors one after the other. Reads each tensor just before it is written.

    check_room: function that receives the total number of bytes, and raises OSError if the disk has
    no room for them.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, _) in tensors.items():
        end = offset + dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    check_room(offset)
    meter = ProgressMeter(offset, progress)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for stored in tensors.values():
            tensor = stored.read()
            assert tensor.shape == stored.shape and tensor.dtype == stored.dtype
            file.write(np.ascontiguousarray(tensor).data)
            meter.add(tensor.nbytes)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a valid safetensors file, and the offset of the file's data in
    bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size
