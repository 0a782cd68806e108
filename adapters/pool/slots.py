"""Device tables with the locations of each loaded adapter's factors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from adapters.pool.lora import ImageTables
from memory.adapter_memory import Placement
from memory.errors import require
from ops.base import AdapterTables, Ops


class Slots:
    """Slots of the tables, allocated one by one. A slot without ranks serves no sequence."""

    def __init__(self, count: int, num_layers: int, num_projections: int, ops: Ops) -> None:
        size = (count, num_layers + 1, num_projections)
        self.tables = AdapterTables(
            a_offset=torch.zeros(size, dtype=torch.int64, device=ops.device),
            b_offset=torch.zeros(size, dtype=torch.int64, device=ops.device),
            rank=torch.zeros(size, dtype=torch.int32, device=ops.device),
        )
        self.count = count
        self._ops = ops
        self._free = list(reversed(range(count)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Allocates a slot. There must be a free one."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Frees a slot that is no longer read."""
        self.tables.replaced.pop(slot, None)
        with self._ops.side_stream("tables"):
            self.tables.rank[slot].zero_()
        self._free.append(slot)

    def write(self, slot: int, image: ImageTables, placement: Placement) -> int:
        """Makes the slot serve the image in the placement. Returns the image's largest rank."""
        starts = np.array([piece.start for piece in placement.pieces])
        shifts = np.array([piece.offset - piece.start for piece in placement.pieces])

        def moved(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
            return offsets + shifts[np.searchsorted(starts, offsets, "right") - 1]

        with self._ops.side_stream("tables"):
            self.tables.a_offset[slot] = torch.from_numpy(moved(image.a_offset))
            self.tables.b_offset[slot] = torch.from_numpy(moved(image.b_offset))
            self.tables.rank[slot] = torch.from_numpy(image.rank.copy())
        if image.replaced:
            self.tables.replaced[slot] = {}
        for module, rows in image.replaced.items():
            ids, first = moved(np.array([rows.ids, rows.rows])).tolist()
            self.tables.replaced[slot][module] = replace(rows, ids=ids, rows=first)
        return int(image.rank.max())

    def check_integrity(self, placements: dict[int, Placement], serving: set[int]) -> None:
        """Raises IntegrityError unless each slot is free or has a placement, and exactly those in
        `serving` have ranks, with all factors inside their pieces."""
        slots = sorted([*placements, *self._free])
        require(slots == list(range(self.count)), f"slots {slots}")
        ranks = self.tables.rank.cpu()
        with_ranks = set(torch.nonzero(ranks.flatten(1).any(dim=1)).flatten().tolist())
        require(with_ranks == serving, f"slots {with_ranks} have ranks, {serving} serve")
        replaced = self.tables.replaced
        require(replaced.keys() <= serving, f"slots {set(replaced)} replace rows")
        for table in (self.tables.a_offset.cpu(), self.tables.b_offset.cpu()):
            for slot in serving:
                offsets = table[slot][ranks[slot] > 0]
                num_inside = sum(
                    int(((offsets >= offset) & (offsets < offset + stop - start)).sum())
                    for offset, start, stop in placements[slot].pieces
                )
                require(num_inside == len(offsets), f"slot {slot}: factors outside of its pieces")
