"""From a schedule to tensors: the only place where accounting becomes kernel input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from adapters.pool.segments import build_segments
from memory.kv_cache import KVCache
from ops.base import (
    PAGE_TOKENS,
    AdapterTables,
    AttentionBatch,
    KVCacheView,
    LoRABatch,
    SamplingBatch,
)
from workers.execution.token_buffer import TokenBuffer
from workers.execution.upload import Array
from workers.layers.forward_batch import ForwardBatch
from workers.scheduling.schedule import Schedule, ScheduledSequence
from workers.scheduling.sequence import Sequence

A = TypeVar("A", Array, Tensor)


class RowInputs(NamedTuple, Generic[A]):
    """What a step's rows read: arrays on the host, or tensors on the device.

    buffer_rows int64 [T]      token buffer row of each row
    buffer_positions int64 [T] and its position there
    last_rows int64 [N]        the row of each sampled sequence's last token
    segment_start int32 [G + 1], segment_slot int32 [G]   as in `LoRABatch`; without adapters G is 0
    The others are as in `AttentionBatch`.
    """

    buffer_rows: A
    buffer_positions: A
    query_start: A
    row_seq: A
    positions: A
    context_lens: A
    block_tables: A
    last_rows: A
    segment_start: A
    segment_slot: A


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest of a step, known to the host: as in `AttentionBatch` and `LoRABatch`."""

    max_query: int
    max_context: int
    max_rank: int


def build_rows(schedule: Schedule, kv: KVCache) -> tuple[RowInputs[Array], Extent]:
    """Rows in schedule order: adapter slots ascending, base-only sequences last."""
    items = schedule.items
    counts = np.fromiter((item.num_tokens for item in items), np.int32, len(items))
    starts = np.fromiter((item.start for item in items), np.int32, len(items))
    buffer_rows = np.fromiter((item.sequence.row for item in items), np.int64, len(items))
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    row_seq = np.repeat(np.arange(len(items), dtype=np.int32), counts)
    positions = np.arange(query_start[-1], dtype=np.int32) - query_start[row_seq] + starts[row_seq]
    context = starts + counts
    num_pages = -(-context // PAGE_TOKENS)
    tables = np.zeros((len(items), int(num_pages.max())), np.int64)
    for index, item in enumerate(items):
        pages = item.sequence.block_table.pages[: num_pages[index]]
        tables[index, : len(pages)] = pages
    segments = build_segments([(item.slot, item.num_tokens) for item in items])
    rows = RowInputs[Array](
        buffer_rows=buffer_rows[row_seq],
        buffer_positions=positions.astype(np.int64),
        query_start=query_start,
        row_seq=row_seq,
        positions=positions,
        context_lens=context.astype(np.int32),
        block_tables=kv.pool.offsets(tables),
        last_rows=np.array(schedule.last_rows, np.int64),
        segment_start=np.zeros(1, np.int32) if segments is None else segments.start,
        segment_slot=np.zeros(0, np.int32) if segments is None else segments.slot,
    )
    max_rank = max(item.max_rank for item in items)
    return rows, Extent(int(counts.max()), int(context.max()), max_rank)


def forward_batch(
    rows: RowInputs[Tensor],
    extent: Extent,
    buffer: TokenBuffer,
    view: KVCacheView,
    tables: AdapterTables,
) -> ForwardBatch:
    """Gathers the input ids: what earlier steps drew is there, whoever has seen it."""
    lora = None
    if len(rows.segment_slot):
        lora = LoRABatch(
            arena=view.arena,
            dtype=view.layout.dtype,
            tables=tables,
            segment_start=rows.segment_start,
            segment_slot=rows.segment_slot,
            max_rank=extent.max_rank,
        )
    attention = AttentionBatch(
        query_start=rows.query_start,
        row_seq=rows.row_seq,
        positions=rows.positions,
        context_lens=rows.context_lens,
        block_tables=rows.block_tables,
        max_query=extent.max_query,
        max_context=extent.max_context,
    )
    input_ids = buffer.gather(rows.buffer_rows, rows.buffer_positions)
    return ForwardBatch(input_ids=input_ids, attention=attention, kv=view, lora=lora)


def build_sampling(items: list[ScheduledSequence]) -> dict[str, Array]:
    """The columns of a `SamplingBatch`: one row of logits per item, in this order; the drawn token
    lands at the item's end."""
    sequences = [item.sequence for item in items]
    params = [sequence.params for sequence in sequences]
    biases = [_bias(item) for item in items]
    bias_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum([len(bias) for bias in biases], out=bias_start[1:])

    def column(values: list[float] | list[int], dtype: type[Any]) -> Array:
        return np.array(values, dtype)

    return {
        "temperature": column([s.temperature for s in sequences], np.float32),
        "top_k": column([p.top_k for p in params], np.int32),
        "top_p": column([p.top_p for p in params], np.float32),
        "min_p": column([p.min_p for p in params], np.float32),
        "seed": column([p.seed for p in params], np.int64),
        "position": column([item.end for item in items], np.int64),
        "choice": column([p.choice for p in params], np.int64),
        "presence": column([p.presence_penalty for p in params], np.float32),
        "frequency": column([p.frequency_penalty for p in params], np.float32),
        "repetition": column([p.repetition_penalty for p in params], np.float32),
        "buffer_row": column([_row(sequence) for sequence in sequences], np.int32),
        "prompt_len": column([sequence.num_prompt for sequence in sequences], np.int32),
        "total_len": column([item.end for item in items], np.int32),
        "bias_start": bias_start,
        "bias_ids": column([token for bias in biases for token in bias], np.int32),
        "bias_values": column([value for bias in biases for value in bias.values()], np.float32),
    }


def sampling_batch(
    items: list[ScheduledSequence], columns: dict[str, Tensor], buffer: TokenBuffer
) -> SamplingBatch:
    """columns: of `build_sampling`, on the device."""
    params = [item.sequence.params for item in items]
    return SamplingBatch(
        **columns,
        token_buffer=buffer.tokens,
        all_greedy=all(item.sequence.temperature == 0 for item in items),
        has_penalties=any(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 for p in params
        ),
        has_bias=len(columns["bias_ids"]) > 0,
    )


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row


def _bias(item: ScheduledSequence) -> dict[int, float]:
    """Until `min_tokens` are generated, end tokens must not be drawn."""
    sequence = item.sequence
    bias = sequence.params.logit_bias or {}
    if item.end - sequence.num_prompt < sequence.params.min_tokens:
        return {**bias, **dict.fromkeys(sequence.end_tokens, float("-inf"))}
    return bias
