"""What the commands of a step change on the device, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ops.base import AdapterTables, PassedEvent
from ops.commands import ClearSlot, Command, PendingCommands, TableRows, WriteSlot, WriteTokens
from tests.adapters.pools import PoolSetup
from workers.execution.batch import ModelBuffers

SIZE = 3, 2, 2


class Copied(PassedEvent):
    """The end of a copy; `note` is called when the device is told to wait for it."""

    def __init__(self, note: Callable[[], None] = lambda: None) -> None:
        self.note = note

    def wait(self) -> None:
        self.note()


def new_buffers() -> ModelBuffers:
    tables = AdapterTables.empty(SIZE, torch.device("cpu"))
    tokens = torch.full((2, 8), -1, dtype=torch.int32)
    return ModelBuffers(torch.zeros(0), tokens, tables)


def write_slot(slot: int, rank: int, replaced: dict[int, TableRows]) -> WriteSlot:
    entries = np.arange(4).reshape(SIZE[1:])
    ranks = np.full(entries.shape, rank, np.int32)
    return WriteSlot(slot, 100 * slot + entries, 1000 * slot + entries, ranks, replaced)


def test_tokens_are_written_from_their_position_on() -> None:
    buffers = new_buffers()
    for command in (
        WriteTokens(1, 0, np.array([5, 6, 7], np.int32)),
        WriteTokens(1, 3, np.array([8], np.int32)),
        WriteTokens(0, 6, np.array([1, 2], np.int32)),
    ):
        buffers.apply(command)
    assert buffers.tokens.tolist() == [[-1] * 6 + [1, 2], [5, 6, 7, 8, -1, -1, -1, -1]]


def test_a_slot_has_what_was_written_last_until_it_is_cleared() -> None:
    """However often the commands are applied. The other slots stay as they are."""
    buffers, rows = new_buffers(), {0: TableRows(1, 2, 3, 4)}
    buffers.copies[1] = buffers.copies[2] = Copied()
    commands: list[Command] = [
        write_slot(1, 8, {}),
        write_slot(2, 4, rows),
        write_slot(1, 16, rows),
        write_slot(2, 2, {}),
    ]
    tables = buffers.tables
    for _ in range(2):
        for command in commands:
            buffers.apply(command)
        assert tables.rank.flatten(1).tolist() == [[0] * 4, [16] * 4, [2] * 4]
        assert tables.a_offset.flatten(1).tolist()[1:] == [
            [100, 101, 102, 103],
            [200, 201, 202, 203],
        ]
        assert tables.b_offset.flatten(1).tolist()[1] == [1000, 1001, 1002, 1003]
        assert tables.replaced == {1: rows}
    for _ in range(2):
        buffers.apply(ClearSlot(1))
        assert tables.rank.flatten(1).any(1).tolist() == [False, False, True]
        assert not tables.replaced


def test_a_slot_is_written_after_the_copy_of_its_adapter() -> None:
    buffers, ranks = new_buffers(), list[int]()
    for slot in (0, 1):
        buffers.copies[slot] = Copied(lambda: ranks.append(int(buffers.tables.rank[1].max())))
    buffers.apply(write_slot(1, 8, {}))
    assert ranks == [0] and buffers.tables.rank[1].max() == 8


def test_the_copy_of_an_adapter_ends_on_its_side_stream_before_its_slot_is_ordered(
    tmp_path: Path,
) -> None:
    """Or else a step would wait for it."""
    setup = PoolSetup(tmp_path, [4])
    commands, waits = setup.pool.device.commands, list[int]()

    class Slow(PassedEvent):
        def synchronize(self) -> None:
            waits.append(len(commands.slots))

    setup.ops.record_event = Slow
    lease = setup.load(0)
    assert waits == [0] and commands.slots.keys() == {lease.slot}
    assert setup.serves(lease.slot, 0)


def test_a_newer_command_of_a_slot_replaces_the_older_one() -> None:
    pending = PendingCommands()
    tokens = WriteTokens(0, 0, np.array([1], np.int32))
    pending.slots[2] = ClearSlot(2)
    pending.tokens.append(tokens)
    pending.slots[2] = newest = write_slot(2, 4, {})
    assert pending.take() == [newest, tokens] and pending.take() == []
