"""Computes log-probabilities of a few tokens with the reference backend, for several adapters in
one pass through the model.

Only one layer's weights are in memory at a time. This is slow, but a model that is being served can
be checked without loading all its weights a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from adapters.manifest import BaseModelShape
from adapters.pool.factors import Factors
from memory.page_key import pages_of
from ops.base import (
    EMBEDDING,
    HEAD,
    AdapterTables,
    AttentionBatch,
    ForwardBatch,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LoRABatch,
    ReplacedRows,
)
from ops.block_matrix import densify
from ops.reference import ReferenceOps
from workers.layers.decoder_layer import run_layer
from workers.layers.lm_head import LMHead
from workers.layers.table_rows import replace_embeddings
from workers.models.checkpoint import Checkpoint
from workers.models.decoder import first_input, load_input_norm, load_layer, rope_tables
from workers.models.loader import WeightLoader
from workers.models.progress import ProgressMeter
from workers.models.spec import ModelSpec

HEAD_ROWS = 8192
"""Maximum number of rows of the output matrix that are in memory at a time."""


class UnmergedOps(ReferenceOps):
    """Reference ops that read adapters from their files, in full precision.

    factors: LoRA factors of each segment's adapter.
    """

    def __init__(self, factors: Sequence[Factors]) -> None:
        super().__init__()
        self._factors = factors
        self.first_column = 0
        """First token id of the part of the output matrix that is being computed; 0 while layers
        are computed."""

    def add_lora(
        self, y: Tensor, x: Tensor, fused: FusedLinear, layer: int, lora: LoRABatch
    ) -> None:
        starts = lora.segment_start.tolist()
        for factors, (first, end) in zip(self._factors, pairwise(starts), strict=True):
            column = 0
            for projection, width in zip(fused.projections, fused.widths, strict=True):
                if (found := factors.read(layer, projection)) is not None:
                    a, b = found
                    own = b[self.first_column : self.first_column + width]
                    y[first:end, column : column + width] += x[first:end] @ a.T @ own.T
                column += width

    def add_embedding_lora(self, y: Tensor, ids: Tensor, lora: LoRABatch, scale: float) -> None:
        starts = lora.segment_start.tolist()
        for factors, (first, end) in zip(self._factors, pairwise(starts), strict=True):
            if (found := factors.read(lora.outer_layer, EMBEDDING)) is not None:
                a, b = found
                y[first:end] += a[:, ids[first:end].long()].T @ b.T * scale


@torch.inference_mode()
def score_tokens(
    folder: Path,
    spec: ModelSpec,
    shape: BaseModelShape,
    dtype: torch.dtype,
    tokens: list[int],
    adapters: Sequence[Factors],
    *,
    on_layer: Callable[[], None],
) -> Tensor:
    """Computes the log-probability of each token except the first, float32 [len(adapters) + 1,
    len(tokens) - 1]. There is one row for each adapter, and a last row for the base model.

    folder: canonical folder of the model. dtype: serving dtype. Weights, keys and values are
    rounded to it, but the adapters' factors are not. on_layer: function that is called after each
    layer.
    """
    ops = UnmergedOps(adapters)
    count, num_tokens = len(adapters) + 1, len(tokens)
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    lora = _segments(len(adapters), num_tokens, shape, dtype) if adapters else None
    ids = torch.tensor(tokens * count, dtype=torch.int32)
    batch = ForwardBatch(ids, *_sequences(count, num_tokens, layout), lora)
    with Checkpoint(folder) as checkpoint:
        loader = WeightLoader(checkpoint, ops, dtype, ProgressMeter(0, None))
        table = densify([checkpoint.get("model.embed_tokens.weight")[torch.tensor(tokens)]])
        rows = torch.arange(num_tokens, dtype=torch.int32).repeat(count)
        residual = ops.embed(rows, table.to(dtype), spec.embed_scale)
        if lora is not None:
            own = _embedding_rows(adapters, tokens)
            replace_embeddings(ops, residual, ids, replace(lora, replaced=own), spec.embed_scale)
            ops.add_embedding_lora(residual, ids, lora, spec.embed_scale)
        x = first_input(ops, residual, load_input_norm(loader, spec, 0))
        ropes = rope_tables(spec, num_tokens)
        for layer, layer_spec in enumerate(spec.layers):
            weights = load_layer(loader, spec, layer, ropes[layer_spec.rope])
            x = run_layer(ops, weights, x, residual, batch)
            on_layer()
        module = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
        weight = checkpoint.get(f"{module}.weight")
        total = torch.full((len(x),), -torch.inf, dtype=torch.float64)
        chosen = torch.zeros(len(x), dtype=torch.float64)
        following = ids.roll(-1).long()
        for start in range(0, spec.vocab_size, HEAD_ROWS):
            part = densify([weight[start : start + HEAD_ROWS]]).to(dtype)
            ops.first_column = start
            head = LMHead(ops, ops.pack_linear(part), spec.logits_scale, spec.logits_softcap)
            if lora is not None:
                own = _head_rows(adapters, num_tokens, start, start + len(part))
                lora = replace(lora, replaced=own)
            logits = head.forward(x, lora=lora).double()
            total = torch.logaddexp(total, logits.logsumexp(-1))
            found = torch.nonzero((following >= start) & (following < start + len(part))).flatten()
            chosen[found] = logits[found, following[found] - start]
    return (chosen - total).view(count, num_tokens)[:, :-1].float()


def _embedding_rows(adapters: Sequence[Factors], tokens: list[int]) -> tuple[ReplacedRows, ...]:
    """Returns, for each adapter, the rows with which it replaces embeddings of these tokens. Leaves
    out adapters that replace no embedding of these tokens."""
    replaced: list[ReplacedRows] = []
    for index, factors in enumerate(adapters):
        found = [factors.read_rows(EMBEDDING, token, token + 1) for token in sorted({*tokens})]
        if own := [each for each in found if each is not None]:
            ids, rows = (torch.cat(parts) for parts in zip(*own, strict=True))
            first = index * len(tokens)
            replaced.append(ReplacedRows(first, first + len(tokens), ids, rows))
    return tuple(replaced)


def _head_rows(
    adapters: Sequence[Factors], num_tokens: int, first: int, end: int
) -> tuple[ReplacedRows, ...]:
    """Returns, for each adapter, the rows with which it replaces rows first..end - 1 of the output
    matrix, and their ids minus `first`. Leaves out adapters that replace none of these rows."""
    replaced: list[ReplacedRows] = []
    for index, factors in enumerate(adapters):
        if (found := factors.read_rows(HEAD, first, end)) is not None:
            own = index * num_tokens
            replaced.append(ReplacedRows(own, own + num_tokens, found[0] - first, found[1]))
    return tuple(replaced)


def _sequences(count: int, length: int, layout: KVLayout) -> tuple[AttentionBatch, KVCacheView]:
    """Returns a batch of `count` prompts of `length` tokens each, and an arena for their KV
    pages."""
    num_pages = pages_of(length)
    arena = torch.zeros(count * num_pages * layout.page_bytes, dtype=torch.uint8)
    sequences = torch.arange(count, dtype=torch.int32)
    attention = AttentionBatch(
        query_start=torch.arange(count + 1, dtype=torch.int32) * length,
        token_seq=sequences.repeat_interleave(length),
        positions=torch.arange(length, dtype=torch.int32).repeat(count),
        context_lens=torch.full((count,), length, dtype=torch.int32),
        block_tables=torch.arange(count * num_pages).view(count, num_pages) * layout.page_bytes,
        max_query=length,
        max_context=length,
    )
    return attention, KVCacheView(arena, layout)


def _segments(count: int, length: int, shape: BaseModelShape, dtype: torch.dtype) -> LoRABatch:
    """Returns a LoRA batch with one segment per adapter. Its adapter tables have only zeros,
    because `UnmergedOps` reads the factors from files."""
    size = (count, shape.num_layers + 1, len(shape.projections))
    offsets = torch.zeros(size, dtype=torch.int64)
    return LoRABatch(
        arena=torch.empty(0, dtype=torch.uint8),
        dtype=dtype,
        tables=AdapterTables(offsets, offsets, torch.zeros(size, dtype=torch.int32)),
        segment_start=torch.arange(count + 1, dtype=torch.int32) * length,
        segment_slot=torch.arange(count, dtype=torch.int32),
        max_rank=0,
    )
