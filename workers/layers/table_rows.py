"""Applies adapters that replace rows of the embedding or of the output matrix.

The host decides in each step which ops to call, so a step with such an adapter does not run as a
CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ops.base import EMBEDDING, HEAD, ForwardBatch, LoRABatch, Ops, ReplacedRows

Array = NDArray[Any]


def with_rows(
    batch: ForwardBatch, segment_start: Array, sampled_start: Array, segment_slot: Array
) -> ForwardBatch:
    """Returns a copy of the batch that also has its adapters' own rows of the embedding and of the
    output matrix.

    segment_start, segment_slot: host copies of the arrays of `batch.lora`. sampled_start: host copy
    of `batch.sample_lora.segment_start`. Both have the same slots.
    """
    if batch.lora is None or batch.sample_lora is None:
        return batch
    lora = with_replaced(batch.lora, EMBEDDING, segment_start, segment_slot)
    sample_lora = with_replaced(batch.sample_lora, HEAD, sampled_start, segment_slot)
    return replace(batch, lora=lora, sample_lora=sample_lora)


def with_replaced(
    lora: LoRABatch, module: int, segment_start: Array, segment_slot: Array
) -> LoRABatch:
    """Returns a copy of the batch that also has its adapters' own rows of one table.

    module: EMBEDDING for the embedding, or HEAD for the output matrix. segment_start, segment_slot:
    segments of the batch, on the host.
    """
    if not lora.tables.replaces_rows(segment_slot):
        return lora
    found: list[ReplacedRows] = []
    spans = pairwise(segment_start.tolist())
    for (first, end), slot in zip(spans, segment_slot.tolist(), strict=True):
        place = lora.tables.replaced.get(slot, {}).get(module)
        if place is not None and first < end:
            ids = _view(lora.arena, place.ids, torch.int32, place.count)
            rows = _view(lora.arena, place.rows, lora.dtype, place.count * place.width)
            found.append(ReplacedRows(first, end, ids, rows.view(-1, place.width)))
    return replace(lora, replaced=tuple(found))


def replace_embeddings(ops: Ops, y: Tensor, ids: Tensor, lora: LoRABatch, scale: float) -> None:
    """Overwrites in y the embeddings of tokens for which the token's adapter has its own row.

    Shape: y [T, K]; ids int32 [T]. scale: factor by which embeddings are multiplied, as in
    `Ops.embed`.
    """
    for each in lora.replaced:
        own = ids[each.first : each.end]
        at = torch.searchsorted(each.ids, own).clamp_(max=len(each.ids) - 1)
        is_found = (each.ids[at] == own).unsqueeze(1)
        part = y[each.first : each.end]
        part.copy_(torch.where(is_found, ops.embed(at.int(), each.rows, scale), part))


def replace_logits(ops: Ops, logits: Tensor, hidden: Tensor, lora: LoRABatch) -> None:
    """Overwrites, in each row of `logits`, the logits of the tokens for which the row's adapter has
    its own row of the output matrix.

    Shape: logits [N, V]; hidden [N, K].
    """
    for each in lora.replaced:
        own = ops.row_products(hidden[each.first : each.end], each.rows)
        logits[each.first : each.end].index_copy_(1, each.ids.long(), own)


def _view(arena: Tensor, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    return arena[offset : offset + count * dtype.itemsize].view(dtype)
