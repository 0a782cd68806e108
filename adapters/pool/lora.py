"""Packing of a validated adapter's files into one image in the device's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapters.format.binding import BoundModule
from adapters.format.tensor_headers import TensorEntry
from adapters.format.validator import AdapterFiles, read_adapter
from adapters.manifest import PROJECTIONS, BaseModelShape
from adapters.pool.stored_modules import stored_modules

ALIGNMENT = 64
"""Bytes: a cache line, and a full vector register."""

SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Properties, other than the adapter, that determine the bytes of an image."""

    num_layers: int
    dtype: torch.dtype
    b_rank_major: bool
    num_projections: int = len(PROJECTIONS)

    @property
    def version(self) -> str:
        """Name of the layout in file names and headers."""
        order = "rn" if self.b_rank_major else "nr"
        return f"1-{self.num_layers}x{self.num_projections}-{str(self.dtype)[6:]}-{order}"


@dataclass(frozen=True, slots=True)
class ImageTables:
    """Locations of the factors in an image. rank 0 = the adapter does not touch this projection.

    rank int32 [L, P]; a_offset, b_offset int64 [L, P], bytes from the start of the image.
    """

    rank: NDArray[np.int32]
    a_offset: NDArray[np.int64]
    b_offset: NDArray[np.int64]

    @classmethod
    def empty(cls, num_layers: int, num_projections: int = len(PROJECTIONS)) -> ImageTables:
        size = (num_layers, num_projections)
        return cls(np.zeros(size, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int64))


def pack(
    files: AdapterFiles, base: BaseModelShape, layout: ImageLayout
) -> tuple[ImageTables, Tensor]:
    """Returns (tables, image uint8 [bytes]): per module A [rank, K], then scaled B, 64-byte
    aligned.

    B is [rank, N] or [N, rank] as the layout specifies. It is scaled in float32 before its one
    rounding to the serving dtype. Raises AdapterRejected if the adapter does not fit the base.
    """
    modules, header = read_adapter(files, base, stored_modules(files, base))
    tables, num_bytes = _lay_out(modules, base, layout)
    image = torch.zeros(num_bytes, dtype=torch.uint8)
    with files.weights.open("rb") as file:
        for module in modules:
            at = (module.layer, module.projection)
            a, b = read_factors(file, header.data_start, module, base)
            _place(image, int(tables.a_offset[at]), a, layout.dtype)
            _place(image, int(tables.b_offset[at]), b.T if layout.b_rank_major else b, layout.dtype)
    return tables, image


def _lay_out(
    modules: tuple[BoundModule, ...], base: BaseModelShape, layout: ImageLayout
) -> tuple[ImageTables, int]:
    tables = ImageTables.empty(layout.num_layers, layout.num_projections)
    end = 0
    for module in modules:
        at = (module.layer, module.projection)
        tables.rank[at] = module.rank
        widths = base.projection_shape(module.layer, base.projections[module.projection])
        for offsets, width in zip((tables.a_offset, tables.b_offset), widths, strict=True):
            offsets[at] = end
            end = _align(end + width * module.rank * layout.dtype.itemsize)
    return tables, end


def read_factors(
    file: BinaryIO, data_start: int, module: BoundModule, base: BaseModelShape
) -> tuple[Tensor, Tensor]:
    """Reads A [rank, in] and B [out, rank] as float32, B scaled and in canonical row order."""
    name = base.projections[module.projection]
    _, num_rows = base.projection_shape(module.layer, name)
    b = _read_tensor(file, data_start, module.b)[module.first_row : module.first_row + num_rows]
    if (order := base.row_order(name)) is not None:
        b = b[order]
    return _read_tensor(file, data_start, module.a), b * module.scale


def _read_tensor(file: BinaryIO, data_start: int, entry: TensorEntry) -> Tensor:
    """Reads a tensor as float32, in its own shape."""
    begin, end = entry.data_offsets
    file.seek(data_start + begin)
    raw = bytearray(file.read(end - begin))
    return torch.frombuffer(raw, dtype=SOURCE_DTYPES[entry.dtype]).view(entry.shape).float()


def _place(image: Tensor, offset: int, values: Tensor, dtype: torch.dtype) -> None:
    size = values.numel() * dtype.itemsize
    image[offset : offset + size].view(dtype).view(values.shape).copy_(values)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
