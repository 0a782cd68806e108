"""Reference backend, with every op in plain torch and written for clarity. Needs no compiler."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.base import (
    EMBEDDING,
    PAGE_TOKENS,
    Activation,
    FusedLinear,
    HostOps,
    KVCacheView,
    LayerAttention,
    LoRABatch,
    PackedLinear,
    QKNorm,
    SamplingBatch,
)
from ops.block_matrix import Weight, densify
from ops.factor_layout import ROWS
from ops.plain_linear import PlainLinear

MASK = 0xFFFFFFFF


class ReferenceOps(HostOps):
    """Ops in float32 torch. In a page, K and V both are `[G][PAGE_TOKENS][D]`."""

    name = "reference"
    factor_layout = ROWS

    def __init__(self, device: torch.device | None = None) -> None:
        """device: device of the tensors, by default the CPU. Another device is used to check the
        results of that device's backend."""
        self.device = torch.device("cpu") if device is None else device

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        return torch.float32

    def pack_linear(self, *weights: Weight, bias: Tensor | None = None) -> PackedLinear:
        return PlainLinear(
            densify(weights).to(torch.float32, copy=True),
            None if bias is None else bias.to(torch.float32, copy=True),
        )

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, PlainLinear)
        return torch.nn.functional.linear(x, weight.weight, weight.bias)

    def embed(self, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return table[ids.long()].float() * scale

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        return _normalise(x, weight, eps)

    def rope_write_kv(
        self, qkv: Tensor, rope: Tensor | None, at: LayerAttention, qk_norm: QKNorm | None = None
    ) -> None:
        batch, kv, num_heads = at.batch, at.kv, at.num_heads
        num_kv, dim = kv.layout.num_kv_heads, kv.layout.head_dim
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv, dim)
        q, k, v = heads.split([num_heads, num_kv, num_kv], dim=1)
        if qk_norm is not None:
            q.copy_(_normalise(q, qk_norm.q_weight, qk_norm.eps))
            k.copy_(_normalise(k, qk_norm.k_weight, qk_norm.eps))
        if rope is not None:
            angles = rope[batch.positions.long()]
            _rotate(q, angles)
            _rotate(k, angles)
        for row, (seq, position) in enumerate(
            zip(batch.token_seq.tolist(), batch.positions.tolist(), strict=True)
        ):
            page = int(batch.block_tables[seq, position // PAGE_TOKENS])
            keys, values = _page(kv, at.layer, page)
            keys[:, position % PAGE_TOKENS] = k[row].to(keys.dtype)
            values[:, position % PAGE_TOKENS] = v[row].to(values.dtype)

    def paged_attention(self, qkv: Tensor, at: LayerAttention) -> Tensor:
        batch, kv, num_heads, window = at.batch, at.kv, at.num_heads, at.window
        num_kv, dim = kv.layout.num_kv_heads, kv.layout.head_dim
        queries = qkv[:, : num_heads * dim].view(-1, num_heads, dim)
        out = qkv.new_empty(len(qkv), num_heads, dim)
        starts = batch.query_start.tolist()
        for seq, length in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            keys, values = _gather(kv, at.layer, batch.block_tables[seq], length)
            keys = keys.repeat_interleave(num_heads // num_kv, dim=0)
            values = values.repeat_interleave(num_heads // num_kv, dim=0)
            scores = torch.einsum("qhd,htd->hqt", queries[rows], keys) * at.scale
            if at.softcap is not None:
                scores = at.softcap * torch.tanh(scores / at.softcap)
            own = batch.positions[rows].long().unsqueeze(1)
            other = torch.arange(length, device=qkv.device).unsqueeze(0)
            hidden = other > own
            if window is not None:
                hidden |= other <= own - window
            scores = scores.masked_fill(hidden, -torch.inf)
            if at.sinks is not None:
                sink = at.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, sink], dim=-1)
            probs = scores.softmax(dim=-1)[:, :, :length]
            out[rows] = torch.einsum("hqt,htd->qhd", probs, values)
        return out.view(len(qkv), num_heads * dim)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def add_lora(
        self, y: Tensor, x: Tensor, fused: FusedLinear, layer: int, lora: LoRABatch
    ) -> None:
        tables = lora.tables
        starts = lora.segment_start.tolist()
        for segment, slot in enumerate(lora.segment_slot.tolist()):
            rows = slice(starts[segment], starts[segment + 1])
            column = 0
            for projection, width in zip(fused.projections, fused.widths, strict=True):
                rank = int(tables.rank[slot, layer, projection])
                if rank > 0 and rows.start < rows.stop:
                    a_offset = int(tables.a_offset[slot, layer, projection])
                    b_offset = int(tables.b_offset[slot, layer, projection])
                    a = _matrix(lora.arena, a_offset, rank, fused.in_features, lora.dtype)
                    b = _matrix(lora.arena, b_offset, width, rank, lora.dtype)
                    y[rows, column : column + width] += x[rows] @ a.T @ b.T
                column += width

    def add_embedding_lora(self, y: Tensor, ids: Tensor, lora: LoRABatch, scale: float) -> None:
        tables, starts = lora.tables, lora.segment_start.tolist()
        for segment, slot in enumerate(lora.segment_slot.tolist()):
            entry = (slot, lora.outer_layer, EMBEDDING)
            rank = int(tables.rank[entry])
            for row in range(starts[segment], starts[segment + 1]) if rank else ():
                a_offset = int(tables.a_offset[entry]) + int(ids[row]) * rank * lora.dtype.itemsize
                b_offset = int(tables.b_offset[entry])
                a = _matrix(lora.arena, a_offset, 1, rank, lora.dtype)
                b = _matrix(lora.arena, b_offset, y.shape[1], rank, lora.dtype)
                y[row] += (a @ b.T)[0] * scale

    def row_products(self, x: Tensor, rows: Tensor) -> Tensor:
        return x @ rows.float().T

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        drawn = [_sample_row(logits[row], batch, row) for row in range(len(logits))]
        return torch.tensor(drawn, dtype=torch.int32, device=logits.device)

    def log_softmax_top(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = logits.double().log_softmax(dim=-1).float()
        chosen = values.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
        ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
        return chosen, ids.int(), values.gather(1, ids)


def gumbel_noise(seed: int, position: int, choice: int, num_tokens: int) -> Tensor:
    """Returns standard Gumbel noise, float32 [num_tokens], which depends only on the arguments and
    the token id.

    Hashes (seed, position, choice) to two 32-bit keys, and then each token id with both keys. The
    hashes are integers, so they are the same on every backend. Only the lowest 32 bits of positions
    and choices are used.
    """
    low, high = 0x9E3779B9, 0x85EBCA6B
    for word in (seed & MASK, seed >> 32 & MASK, position & MASK, choice & MASK):
        low, high = int(_mix(torch.tensor(low ^ word))), int(_mix(torch.tensor(high ^ word)))
    bits = _mix((_mix(torch.arange(num_tokens) ^ low) + high) & MASK)
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """Computes the 32-bit hash `lowbias32` (C. Wellons, hash-prospector) on 32 bits in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _sample_row(logits: Tensor, batch: SamplingBatch, row: int) -> int:
    if logits.isnan().any():
        return -1
    if batch.has_bias:
        span = slice(int(batch.bias_start[row]), int(batch.bias_start[row + 1]))
        ids, values = batch.bias_ids[span].long(), batch.bias_values[span]
        is_known = (ids >= 0) & (ids < len(logits))
        logits.index_add_(0, ids[is_known], values[is_known])
    if batch.has_penalties:
        _penalise(logits, batch, row)
    temperature = float(batch.temperature[row])
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = _keep_top_k(logits / temperature, int(batch.top_k[row]))
    scaled = _keep_top_p(scaled, float(batch.top_p[row]))
    scaled = _keep_min_p(scaled, float(batch.min_p[row]))
    key = (int(batch.seed[row]), int(batch.position[row]), int(batch.choice[row]))
    noise = gumbel_noise(*key, len(logits)).to(logits.device)
    return int((scaled + noise).argmax())


def _penalise(logits: Tensor, batch: SamplingBatch, row: int) -> None:
    """Applies the repetition penalty to prompt and generated tokens, then the frequency and
    presence penalties to generated tokens. Changes the logits in place."""
    tokens = batch.token_buffer[int(batch.buffer_slot[row])].long()
    prompt_len, total_len = int(batch.prompt_len[row]), int(batch.total_len[row])
    seen = tokens[:total_len].unique()
    values, repetition = logits[seen], batch.repetition[row]
    logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    generated, counts = tokens[prompt_len:total_len].unique(return_counts=True)
    logits[generated] -= batch.frequency[row] * counts + batch.presence[row]


def _keep_top_k(scaled: Tensor, top_k: int) -> Tensor:
    """Keeps the k largest logits, and all logits equal to the smallest of the k. Sets others to
    -inf."""
    if top_k <= 0 or top_k >= len(scaled):
        return scaled
    return scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)


def _keep_top_p(scaled: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest of the largest logits whose probabilities add up to p, and all logits equal
    to the smallest of them. Sets others to -inf."""
    if top_p >= 1.0:
        return scaled
    ordered = scaled.sort(descending=True).values
    mass = (ordered - ordered[0]).exp().double()
    before = mass.cumsum(dim=0) - mass
    last = int((before < top_p * mass.sum()).sum()) - 1
    return scaled.masked_fill(scaled < ordered[max(last, 0)], -torch.inf)


def _keep_min_p(scaled: Tensor, min_p: float) -> Tensor:
    """Keeps logits whose probability is at least min_p times the largest. Sets others to -inf."""
    if min_p <= 0.0:
        return scaled
    return scaled.masked_fill(scaled < scaled.max() + math.log(min_p), -torch.inf)


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, angles: Tensor) -> None:
    """Rotates x [T, heads, D] in place. angles: [T, D], cosines then sines."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.clone().chunk(2, dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _matrix(arena: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    size = rows * columns * dtype.itemsize
    return arena[offset : offset + size].view(dtype).view(rows, columns).float()


def _page(kv: KVCacheView, layer: int, page: int) -> tuple[Tensor, Tensor]:
    """Returns views of K and V of one layer of a page, each [G, PAGE_TOKENS, D]."""
    layout = kv.layout
    start = page + layer * layout.layer_bytes
    both = kv.arena[start : start + layout.layer_bytes].view(layout.dtype)
    keys, values = both.view(2, layout.num_kv_heads, PAGE_TOKENS, layout.head_dim)
    return keys, values


def _gather(kv: KVCacheView, layer: int, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns K and V of a sequence's first `length` tokens, each float32 [G, length, D]."""
    num_pages = -(-length // PAGE_TOKENS)
    pages = [_page(kv, layer, page) for page in block_table[:num_pages].tolist()]
    keys = torch.cat([page[0] for page in pages], dim=1)[:, :length].float()
    values = torch.cat([page[1] for page in pages], dim=1)[:, :length].float()
    return keys, values
