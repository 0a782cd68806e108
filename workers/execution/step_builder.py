"""Conversion of scheduled sequences to a `StepInput`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memory.page_key import PAGE_TOKENS
from memory.pages import PagePool
from ops.commands import Command
from workers.execution.step_input import Array, PoolInput, SampleInput, ScoreInput, StepInput
from workers.scheduling.constraint import effective_bans
from workers.scheduling.schedule import ScheduledSequence
from workers.wire.protocol import OutputKind, Pooling


class BlockTables:
    """Block tables, one row per sequence slot. A step writes only pages added since the previous
    step, because a sequence's list of pages only grows or is replaced by another list."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._offsets = np.zeros((0, 0), np.int64)
        self._written: dict[int, tuple[list[int], int]] = {}
        """Pages of each slot's sequence, and the number of them whose offsets are stored."""

    def rows(self, slots: Array, lists: list[list[int]], width: int) -> NDArray[np.int64]:
        """Returns the byte offsets of the pages of the sequences in these slots, int64 [S, width].
        lists: pages of each sequence. Entries past a sequence's last page are undefined."""
        num_slots, num_pages = int(slots.max()) + 1, max(width, max(map(len, lists)))
        rows, columns = self._offsets.shape
        if num_slots > rows or num_pages > columns:
            larger = np.zeros((max(rows, num_slots), max(columns, 2 * num_pages)), np.int64)
            larger[:rows, :columns] = self._offsets
            self._offsets = larger
        for slot, pages in zip(slots.tolist(), lists, strict=True):
            written, count = self._written.get(slot, (None, 0))
            start, end = count if written is pages else 0, len(pages)
            if start != end:
                new = np.array(pages[start:], np.int64)
                self._offsets[slot, start:end] = self._pool.offsets(new)
                self._written[slot] = pages, end
        return self._offsets[slots, :width]


def build_step_input(
    items: list[ScheduledSequence], tables: BlockTables, commands: Sequence[Command] = ()
) -> StepInput:
    """Converts the scheduled sequences to plain data, in schedule order."""
    sequences = [item.sequence for item in items]
    counts = np.array([item.num_tokens for item in items], np.int32)
    starts = np.array([item.start for item in items], np.int32)
    num_pages = -(-(starts + counts) // PAGE_TOKENS)
    slots = np.array([sequence.slot for sequence in sequences], np.int64)
    lists = [sequence.block_table.pages for sequence in sequences]
    step = StepInput(
        sequence_slots=slots,
        adapter_slots=np.array([item.adapter_slot for item in items], np.int32),
        starts=starts,
        counts=counts,
        block_tables=tables.rows(slots, lists, int(num_pages.max())),
        max_rank=max([item.max_rank for item in items]),
        samples=[_sample(i, item) for i, item in enumerate(items) if item.is_sampled],
        scores=[],
        commands=commands,
    )
    for index, item in enumerate(items):
        request = item.sequence.request
        if request.params.prompt_logprobs is not None:
            step.scores.extend(_scores(index, item, request.params.prompt_logprobs))
        if request.kind is OutputKind.EMBED:
            step.pools.extend(_pools(index, item))
    return step


def _sample(index: int, item: ScheduledSequence) -> SampleInput:
    """Returns the parameters for drawing the sequence's next token. Until `min_tokens` tokens are
    generated, end tokens are banned. Bans are dropped if they would leave no allowed token."""
    sequence, params = item.sequence, item.sequence.request.params
    banned, mask = sequence.constraint.banned, sequence.constraint.mask
    if item.end - sequence.num_prompt < params.min_tokens:
        banned |= sequence.end_tokens
    if banned:
        banned = effective_bans(banned, mask)
    return SampleInput(index, item.end, sequence.num_prompt, params, banned, mask)


def _scores(index: int, item: ScheduledSequence, num_top: int) -> list[ScoreInput]:
    """Returns the request to score the prompt tokens that follow this step's tokens, or an empty
    list if no prompt token follows."""
    first = item.start + 1
    last = min(first + item.num_tokens, item.sequence.num_prompt)
    targets = item.sequence.tokens[first:last]
    return [ScoreInput(index, targets, num_top)] if targets else []


def _pools(index: int, item: ScheduledSequence) -> list[PoolInput]:
    """Returns the request to pool tokens of this step, or an empty list if none is needed."""
    request, num_tokens = item.sequence.request, item.num_tokens
    match request.pooling:
        case Pooling.MEAN:
            return [PoolInput(index, 0, num_tokens)]
        case Pooling.CLS:
            return [PoolInput(index, 0, 1)] if item.start == 0 else []
        case Pooling.LAST:
            is_last = item.end == len(item.sequence.tokens)
            last = PoolInput(index, num_tokens - 1, num_tokens, request.labels)
            return [last] if is_last else []
