"""Packs a validated adapter's files into one image in the device's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapters.format.binding import BoundModule, BoundRows
from adapters.format.tensor_headers import TensorEntry
from adapters.format.validator import AdapterFiles, StoredAdapter, aligned, read_adapter
from adapters.manifest import PROJECTIONS, BaseModelShape
from adapters.pool.packed_image import ImageTables
from ops.commands import TableRows
from ops.factor_layout import FactorLayout

CHUNK_BYTES = 16 << 20
"""Maximum bytes of rows that are read at a time, counted as float32."""

SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Properties, other than the adapter, that determine the bytes of an image."""

    num_layers: int
    dtype: torch.dtype
    factors: FactorLayout
    num_projections: int = len(PROJECTIONS)

    @property
    def version(self) -> str:
        """Name of the layout in file names and headers."""
        size = f"{self.num_layers}x{self.num_projections}"
        return f"2-{size}-{str(self.dtype)[6:]}-{self.factors.name}"


def pack(
    files: AdapterFiles, base: BaseModelShape, layout: ImageLayout
) -> tuple[ImageTables, Tensor]:
    """Returns the tables and the image, uint8 [bytes]. The image contains A and scaled B of each
    module, in the form of `packed_factors`, then the token ids and rows that replace rows of a
    table. Each of these parts is 64-byte aligned.

    B is scaled in float32 and then rounded once to the serving dtype. Raises AdapterRejected if the
    adapter does not fit the base.
    """
    adapter = read_adapter(files, base)
    start = adapter.header.data_start
    tables, num_bytes = _lay_out(adapter, base, layout)
    image = torch.zeros(num_bytes, dtype=torch.uint8)
    with files.weights.open("rb") as file:
        for module in adapter.modules:
            at = (module.layer, module.projection)
            factors = read_factors(file, start, module, base)
            name = base.modules(module.layer)[module.projection]
            a, b = packed_factors(name, *factors, layout.factors, layout.dtype)
            _place(image, int(tables.a_offset[at]), a, layout.dtype)
            _place(image, int(tables.b_offset[at]), b, layout.dtype)
        for bound in adapter.rows:
            _place_rows(image, tables.replaced[bound.module], file, start, bound, layout.dtype)
    return tables, image


def _place_rows(
    image: Tensor,
    place: TableRows,
    file: BinaryIO,
    data_start: int,
    bound: BoundRows,
    dtype: torch.dtype,
) -> None:
    ids, order = _row_order(bound)
    _place(image, place.ids, torch.from_numpy(ids), torch.int32)
    num_bytes = place.count * place.width * dtype.itemsize
    rows = image[place.rows : place.rows + num_bytes].view(dtype).view(-1, place.width)
    places = torch.from_numpy(np.argsort(order))
    step = max(CHUNK_BYTES // (4 * place.width), 1)
    for first in range(0, place.count, step):
        end = min(first + step, place.count)
        rows[places[first:end]] = read_rows(file, data_start, bound.entry, first, end).to(dtype)


def packed_factors(
    module: str, a: Tensor, b: Tensor, layout: FactorLayout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the factors A [rank, K] and B [N, rank] in the form that ops read. A of the embedding
    is only transposed to [K, rank], so that a token's row is contiguous."""
    a = a.T.to(dtype) if module == "embed_tokens" else layout.pack(a, dtype)
    return a, layout.pack(b, dtype)


def _lay_out(
    adapter: StoredAdapter, base: BaseModelShape, layout: ImageLayout
) -> tuple[ImageTables, int]:
    tables = ImageTables.empty(layout.num_layers, layout.num_projections)
    end = 0
    for module in adapter.modules:
        at = (module.layer, module.projection)
        tables.rank[at] = module.rank
        widths = base.projection_shape(module.layer, base.modules(module.layer)[module.projection])
        shapes = (module.rank, widths[0]), (widths[1], module.rank)
        for offsets, shape in zip((tables.a_offset, tables.b_offset), shapes, strict=True):
            offsets[at] = end
            end = aligned(end + layout.factors.num_bytes(*shape, layout.dtype))
    places: dict[str, int] = {}
    for bound in adapter.rows:
        ids, end = end, aligned(end + bound.count * torch.int32.itemsize)
        if bound.name not in places:
            places[bound.name] = end
            end = aligned(end + bound.count * base.hidden_size * layout.dtype.itemsize)
        rows = places[bound.name]
        tables.replaced[bound.module] = TableRows(bound.count, base.hidden_size, ids, rows)
    return tables, end


def read_factors(
    file: BinaryIO, data_start: int, module: BoundModule, base: BaseModelShape
) -> tuple[Tensor, Tensor]:
    """Reads A [rank, in] and scaled B [out, rank], in canonical order of its rows, as float32."""
    name = base.modules(module.layer)[module.projection]
    _, num_rows = base.projection_shape(module.layer, name)
    b = _read_tensor(file, data_start, module.b)[module.first_row : module.first_row + num_rows]
    if (order := base.row_order(name)) is not None:
        b = b[order]
    return _read_tensor(file, data_start, module.a), b * module.scale


def _read_tensor(file: BinaryIO, data_start: int, entry: TensorEntry) -> Tensor:
    """Reads a tensor as float32, in the shape that it has in the file."""
    begin, end = entry.data_offsets
    file.seek(data_start + begin)
    raw = bytearray(file.read(end - begin))
    return torch.frombuffer(raw, dtype=SOURCE_DTYPES[entry.dtype]).view(entry.shape).float()


def read_rows(file: BinaryIO, data_start: int, entry: TensorEntry, first: int, end: int) -> Tensor:
    """Reads the rows first..end - 1 of a matrix, in the file's dtype."""
    dtype, width = SOURCE_DTYPES[entry.dtype], entry.shape[1]
    row_bytes = width * dtype.itemsize
    file.seek(data_start + entry.data_offsets[0] + first * row_bytes)
    raw = bytearray(file.read((end - first) * row_bytes))
    return torch.frombuffer(raw, dtype=dtype).view(end - first, width)


def read_replaced(
    file: BinaryIO, data_start: int, bound: BoundRows, first: int, end: int
) -> tuple[Tensor, Tensor] | None:
    """Reads the rows that replace a table's rows for the tokens first..end - 1. Returns the token
    ids, int32 [n], ascending, and the rows [n, K] in the file's dtype. Returns None if there are
    none."""
    ids, order = _row_order(bound)
    low, high = np.searchsorted(ids, (first, end)).tolist()
    if low == high:
        return None
    if bound.tokens is None:
        rows = read_rows(file, data_start, bound.entry, low, high)
    else:
        found = order[low:high].tolist()
        rows = torch.cat([read_rows(file, data_start, bound.entry, n, n + 1) for n in found])
    return torch.from_numpy(ids[low:high]), rows


def _row_order(bound: BoundRows) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Returns the token ids of the rows, ascending, and the index of each id's row in the file."""
    if bound.tokens is None:
        return np.arange(bound.count, dtype=np.int32), np.arange(bound.count)
    tokens = np.array(bound.tokens, np.int32)
    order = np.argsort(tokens)
    return tokens[order], order


def _place(image: Tensor, offset: int, values: Tensor, dtype: torch.dtype) -> None:
    size = values.numel() * dtype.itemsize
    image[offset : offset + size].view(dtype).view(values.shape).copy_(values)
