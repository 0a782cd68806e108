"""Commands that change a model's device buffers before a step is computed.

They are plain data, so that several devices can apply the same commands in the same order. They
change nothing that a step in flight uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TableRows:
    """Location of the rows that an adapter replaces in the embedding or in the output matrix.
    Offsets are in bytes from the start of the adapter's image or of the arena.

    ids: offset of the token ids of the rows, int32 [count], ascending. rows: offset of the rows,
    [count, width] in the serving dtype.
    """

    count: int
    width: int
    ids: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteTokens:
    """Command to write tokens, int32 [N], to a slot of the token buffer from `position` on."""

    slot: int
    position: int
    tokens: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class WriteSlot:
    """Command to write the entries of an adapter slot (see `ops.base.AdapterTables`), without the
    dimension of slots. The device first waits for the copy of the adapter to the arena."""

    slot: int
    a_offset: NDArray[Any]
    b_offset: NDArray[Any]
    rank: NDArray[Any]
    replaced: Mapping[int, TableRows]


@dataclass(frozen=True, slots=True)
class ClearSlot:
    """Command to set all ranks of an adapter slot to 0. Such a slot serves no sequence."""

    slot: int


Command = WriteTokens | WriteSlot | ClearSlot


class PendingCommands:
    """Commands for the model's next step. slots: newest command of each adapter slot, which
    replaces older ones. Used with the memory lock held."""

    def __init__(self) -> None:
        self.slots: dict[int, WriteSlot | ClearSlot] = {}
        self.tokens: list[WriteTokens] = []

    def take(self) -> list[Command]:
        """Removes and returns all commands."""
        taken = [*self.slots.values(), *self.tokens]
        self.slots.clear()
        self.tokens.clear()
        return taken
