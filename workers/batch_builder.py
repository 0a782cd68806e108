"""From a schedule to tensors: the only place where accounting becomes kernel input."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adapters.segments import build_segments
from memory.kv_cache import KVCache
from ops.base import (
    PAGE_TOKENS,
    AdapterTables,
    AttentionBatch,
    KVCacheView,
    LoRABatch,
    SamplingBatch,
)
from workers.batch import ForwardBatch
from workers.sequence import Sequence
from workers.step import Schedule
from workers.token_buffer import TokenBuffer


def build_forward_batch(
    schedule: Schedule,
    buffer: TokenBuffer,
    kv: KVCache,
    view: KVCacheView,
    tables: AdapterTables,
) -> ForwardBatch:
    """Rows in schedule order: adapter slots ascending, base-only sequences last."""
    items = schedule.items
    device = view.arena.device
    counts = np.fromiter((item.num_tokens for item in items), np.int32, len(items))
    starts = np.fromiter((item.sequence.num_computed for item in items), np.int32, len(items))
    buffer_rows = np.fromiter((item.sequence.row for item in items), np.int64, len(items))
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    row_seq = np.repeat(np.arange(len(items), dtype=np.int32), counts)
    positions = np.arange(query_start[-1], dtype=np.int32) - query_start[row_seq] + starts[row_seq]
    context = starts + counts
    num_pages = -(-context // PAGE_TOKENS)
    tables_host = np.zeros((len(items), int(num_pages.max())), np.int64)
    for index, item in enumerate(items):
        assert item.sequence.block_table is not None
        pages = item.sequence.block_table.pages[: num_pages[index]]
        tables_host[index, : len(pages)] = pages
    block_tables = kv.pool.offsets(tables_host)

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    attention = AttentionBatch(
        query_start=upload(query_start),
        row_seq=upload(row_seq),
        positions=upload(positions),
        context_lens=upload(context.astype(np.int32)),
        block_tables=upload(block_tables),
        max_query=int(counts.max()),
        max_context=int(context.max()),
    )
    return ForwardBatch(
        input_ids=buffer.gather(upload(buffer_rows[row_seq]), upload(positions.astype(np.int64))),
        attention=attention,
        kv=view,
        lora=_build_lora_batch(schedule, view, tables),
    )


def _build_lora_batch(
    schedule: Schedule, view: KVCacheView, tables: AdapterTables
) -> LoRABatch | None:
    segments = build_segments([(item.slot, item.num_tokens) for item in schedule.items])
    if segments is None:
        return None
    device = view.arena.device
    return LoRABatch(
        arena=view.arena,
        dtype=view.layout.dtype,
        tables=tables,
        segment_start=torch.from_numpy(segments.start).to(device),
        segment_slot=torch.from_numpy(segments.slot).to(device),
        max_rank=max(item.max_rank for item in schedule.items),
    )


def build_sampling_batch(
    sequences: list[Sequence], buffer: TokenBuffer, device: torch.device
) -> SamplingBatch:
    """One row of logits per sequence, in this order; the drawn token lands at position
    len(tokens)."""
    params = [sequence.params for sequence in sequences]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    biases = [_bias(sequence) for sequence in sequences]
    bias_start = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum([len(bias) for bias in biases], out=bias_start[1:])
    return SamplingBatch(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column([p.seed for p in params], torch.int64),
        position=column([len(sequence.tokens) for sequence in sequences], torch.int64),
        choice=column([p.choice for p in params], torch.int64),
        presence=column([p.presence_penalty for p in params], torch.float32),
        frequency=column([p.frequency_penalty for p in params], torch.float32),
        repetition=column([p.repetition_penalty for p in params], torch.float32),
        token_buffer=buffer.tokens,
        buffer_row=column([_row(sequence) for sequence in sequences], torch.int32),
        prompt_len=column([sequence.num_prompt for sequence in sequences], torch.int32),
        total_len=column([len(sequence.tokens) for sequence in sequences], torch.int32),
        bias_start=torch.from_numpy(bias_start).to(device),
        bias_ids=column([token for bias in biases for token in bias], torch.int32),
        bias_values=column([value for bias in biases for value in bias.values()], torch.float32),
        all_greedy=all(p.temperature == 0 for p in params),
        has_penalties=any(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 for p in params
        ),
        has_bias=bool(bias_start[-1]),
    )


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row


def _bias(sequence: Sequence) -> dict[int, float]:
    bias = sequence.params.logit_bias or {}
    if sequence.is_end_banned:
        return {**bias, **dict.fromkeys(sequence.end_tokens, float("-inf"))}
    return bias
