"""The reference backend's opinion of a few tokens, with one layer's weights in memory at a time.

Slow and small: it stands beside a served model to check it, without a second copy of the weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from adapters.manifest import PROJECTIONS, BaseModelShape
from adapters.pool.factors import Factors
from ops.base import EMBEDDING, HEAD, PAGE_TOKENS, AttentionBatch, KVCacheView, KVLayout
from ops.block_matrix import Weight, densify
from ops.reference import ReferenceOps
from workers.layers.decoder_layer import run_layer
from workers.layers.forward_batch import ForwardBatch
from workers.layers.lm_head import LMHead
from workers.models.checkpoint import Checkpoint
from workers.models.decoder import first_input, load_input_norm, load_layer, rope_tables
from workers.models.loader import WeightLoader
from workers.models.progress import ProgressMeter
from workers.models.spec import ModelSpec

HEAD_ROWS = 8192
"""Rows of the output matrix that are in memory at a time."""


class MergedLoader(WeightLoader):
    """Weights rounded to the serving dtype, then float32 with an adapter's products added to them,
    as peft merges."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        shape: BaseModelShape,
        factors: Factors | None,
    ) -> None:
        super().__init__(checkpoint, ReferenceOps(), dtype, ProgressMeter(0, None))
        self._factors = factors
        self._projections = {
            f"{shape.module_path(layer, name)}.weight": (layer, index)
            for layer in range(shape.num_layers)
            for index, name in enumerate(PROJECTIONS)
        }

    def _weight(self, name: str) -> Weight:
        weight = densify([super()._weight(name)]).float()
        projection = self._projections.get(name)
        found = (
            None if self._factors is None or projection is None else self._factors.read(*projection)
        )
        return weight if found is None else torch.addmm(weight, found[1], found[0])


@torch.inference_mode()
def score_tokens(
    folder: Path,
    spec: ModelSpec,
    shape: BaseModelShape,
    dtype: torch.dtype,
    tokens: list[int],
    factors: Factors | None = None,
) -> Tensor:
    """Log-probabilities float32 [len(tokens), V] of what follows each token.

    folder: a canonical model. dtype: what it is served in; weights, keys and values are rounded so.
    factors: of the adapter, if any, in full precision.
    """
    with Checkpoint(folder) as checkpoint:
        loader = MergedLoader(checkpoint, dtype, shape, factors)
        ops = loader.ops
        batch = _one_sequence(
            tokens, KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
        )
        rows_of_table = checkpoint.get("model.embed_tokens.weight")[batch.input_ids.long()]
        table = densify([rows_of_table]).to(dtype).float()
        if factors is not None and (found := factors.read(spec.num_layers, EMBEDDING)) is not None:
            table = torch.addmm(table, found[0][:, tokens].T, found[1].T)
        rows = torch.arange(len(tokens), dtype=torch.int32)
        residual = ops.embed(rows, table, spec.embed_scale)
        x = first_input(ops, residual, load_input_norm(loader, spec, 0))
        ropes = rope_tables(spec, len(tokens))
        for layer, layer_spec in enumerate(spec.layers):
            weights = load_layer(loader, spec, layer, ropes[layer_spec.rope])
            x = run_layer(ops, weights, x, residual, batch.attention, batch.kv, batch.lora)
        module = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
        weight = checkpoint.get(f"{module}.weight")
        found = None if factors is None else factors.read(spec.num_layers, HEAD)
        parts: list[Tensor] = []
        for start in range(0, spec.vocab_size, HEAD_ROWS):
            part = densify([weight[start : start + HEAD_ROWS]]).to(dtype).float()
            if found is not None:
                part = torch.addmm(part, found[1][start : start + HEAD_ROWS], found[0])
            head = LMHead(ops, ops.pack_linear(part), spec.logits_scale, spec.logits_softcap)
            parts.append(head.forward(x))
    return torch.cat(parts, dim=1).double().log_softmax(-1).float()


def _one_sequence(tokens: list[int], layout: KVLayout) -> ForwardBatch:
    """All the tokens as one prompt, in an arena of its own."""
    num_tokens = len(tokens)
    num_pages = -(-num_tokens // PAGE_TOKENS)
    arena = torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8)
    attention = AttentionBatch(
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        token_seq=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.arange(num_tokens, dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.arange(num_pages).unsqueeze(0) * layout.page_bytes,
        max_query=num_tokens,
        max_context=num_tokens,
    )
    ids = torch.tensor(tokens, dtype=torch.int32)
    return ForwardBatch(ids, attention, KVCacheView(arena, layout), lora=None)
