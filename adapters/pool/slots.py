"""Device tables with the locations of each loaded adapter's factors."""

from __future__ import annotations

from dataclasses import replace

import torch

from adapters.pool.lora import ImageTables
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

    def write(self, slot: int, image: ImageTables, start: int) -> int:
        """Makes the slot serve the image that begins at byte `start` of the device's memory.
        Returns the image's largest rank."""
        with self._ops.side_stream("tables"):
            self.tables.a_offset[slot] = torch.from_numpy(image.a_offset + start)
            self.tables.b_offset[slot] = torch.from_numpy(image.b_offset + start)
            self.tables.rank[slot] = torch.from_numpy(image.rank.copy())
        if image.replaced:
            self.tables.replaced[slot] = {
                module: replace(rows, ids=rows.ids + start, rows=rows.rows + start)
                for module, rows in image.replaced.items()
            }
        return int(image.rank.max())

    def check_integrity(self, places: dict[int, range], serving: set[int]) -> None:
        """Raises IntegrityError unless each slot is free or in `places`, and exactly those in
        `serving` have ranks, with all factors inside their bytes of the device's memory."""
        slots = sorted([*places, *self._free])
        require(slots == list(range(self.count)), f"slots {slots}")
        ranks = self.tables.rank.cpu()
        with_ranks = set(torch.nonzero(ranks.flatten(1).any(dim=1)).flatten().tolist())
        require(with_ranks == serving, f"slots {with_ranks} have ranks, {serving} serve")
        replaced = self.tables.replaced
        require(replaced.keys() <= serving, f"slots {set(replaced)} replace rows")
        for table in (self.tables.a_offset.cpu(), self.tables.b_offset.cpu()):
            for slot in serving:
                offsets, place = table[slot][ranks[slot] > 0], places[slot]
                inside = bool(((offsets >= place.start) & (offsets < place.stop)).all())
                require(inside, f"slot {slot}: factors outside of its run")
