"""Conversion of a `Schedule` to a `StepInput`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memory.page_key import PAGE_TOKENS
from memory.pages import PagePool
from workers.execution.step_input import Array, PoolInput, SampleInput, ScoreInput, StepInput
from workers.scheduling.constraint import effective_bans
from workers.scheduling.schedule import Schedule, ScheduledSequence
from workers.wire.protocol import OutputKind, Pooling


class BlockTables:
    """Block tables, one row per sequence slot. A step writes only pages added since the previous
    step, because a sequence's list of pages only grows or is replaced by another list."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._offsets = np.zeros((0, 0), np.int64)
        self._lists: list[list[int]] = []
        self._counts: list[int] = []
        """Number of pages of each list that are already in the array."""

    def rows(self, slots: Array, lists: list[list[int]], width: int) -> NDArray[np.int64]:
        """Returns byte offsets of pages, int64 [S, width], of the sequences in these slots. lists:
        each sequence's pages. Entries past a sequence's last page are undefined."""
        self._make_room(int(slots.max()) + 1, max(width, max(map(len, lists))))
        for slot, pages in zip(slots.tolist(), lists, strict=True):
            count = len(pages)
            known = self._counts[slot] if self._lists[slot] is pages else 0
            if known != count:
                new = np.array(pages[known:], np.int64)
                self._offsets[slot, known:count] = self._pool.offsets(new)
                self._lists[slot], self._counts[slot] = pages, count
        return self._offsets[slots, :width]

    def _make_room(self, num_slots: int, width: int) -> None:
        rows, columns = self._offsets.shape
        if num_slots > rows or width > columns:
            larger = np.zeros((max(rows, num_slots), max(columns, 2 * width)), np.int64)
            larger[:rows, :columns] = self._offsets
            self._offsets = larger
        missing = num_slots - len(self._lists)
        self._lists += [[] for _ in range(missing)]
        self._counts += [0] * missing


def build_step_input(schedule: Schedule, tables: BlockTables) -> StepInput:
    """Converts the scheduled sequences to plain data, in schedule order."""
    items = schedule.items
    num_sequences = len(items)
    sequences = [item.sequence for item in items]
    counts = np.fromiter((item.num_tokens for item in items), np.int32, num_sequences)
    starts = np.fromiter((item.start for item in items), np.int32, num_sequences)
    num_pages = -(-(starts + counts) // PAGE_TOKENS)
    slots = np.fromiter((s.slot for s in sequences), np.int64, num_sequences)
    lists = [sequence.block_table.pages for sequence in sequences]
    return StepInput(
        sequence_slots=slots,
        adapter_slots=np.fromiter((item.adapter_slot for item in items), np.int32, num_sequences),
        starts=starts,
        counts=counts,
        block_tables=tables.rows(slots, lists, int(num_pages.max())),
        max_rank=max(item.max_rank for item in items),
        samples=[_sample(i, item) for i, item in enumerate(items) if item.is_sampled],
        scores=[score for i, item in enumerate(items) if (score := _score(i, item)) is not None],
        pools=[pool for i, item in enumerate(items) if (pool := _pool(i, item)) is not None],
    )


def _sample(index: int, item: ScheduledSequence) -> SampleInput:
    """Returns the parameters for the sequence's next token. Until `min_tokens` are generated,
    tokens that end the sequence are banned. Bans are dropped if they would leave no token."""
    sequence, params = item.sequence, item.sequence.params
    banned, mask = sequence.constraint.banned, sequence.constraint.mask
    if item.end - sequence.num_prompt < params.min_tokens:
        banned |= sequence.end_tokens
    if banned:
        banned = effective_bans(banned, mask)
    return SampleInput(index, item.end, sequence.num_prompt, params, banned, mask)


def _score(index: int, item: ScheduledSequence) -> ScoreInput | None:
    """Returns a request to score prompt tokens that follow tokens of this step, or None."""
    num_top = item.sequence.params.prompt_logprobs
    if num_top is None:
        return None
    first = item.start + 1
    last = min(first + item.num_tokens, item.sequence.num_prompt)
    targets = item.sequence.tokens[first:last]
    return ScoreInput(index, targets, num_top) if targets else None


def _pool(index: int, item: ScheduledSequence) -> PoolInput | None:
    """Returns a request for this step's tokens that the sequence's vector needs, or None."""
    request, num_tokens = item.sequence.request, item.num_tokens
    if request.kind is not OutputKind.EMBED:
        return None
    match request.pooling:
        case Pooling.MEAN:
            return PoolInput(index, 0, num_tokens)
        case Pooling.CLS:
            return PoolInput(index, 0, 1) if item.start == 0 else None
        case Pooling.LAST:
            is_last = item.end == len(item.sequence.tokens)
            return PoolInput(index, num_tokens - 1, num_tokens, request.labels) if is_last else None
