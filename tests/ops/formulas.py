"""The ops once more, from their definitions, in float64: what every backend is held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.base import AttentionBatch, FusedLinear, LoRABatch, QKNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """One head [D] by one position's cos and sin [D]."""
    first, second = torch.complex(*x.chunk(2)), torch.complex(*angles.double().chunk(2))
    turned = first * second
    return torch.cat((turned.real, turned.imag))


def rope(qkv: Tensor, table: Tensor, positions: Tensor, heads: int, norm: QKNorm | None) -> Tensor:
    """Rotated q and k and plain v: [T, heads of q, k and v, D]."""
    dim = table.shape[1]
    out = qkv.double().view(len(qkv), -1, dim).clone()
    num_kv = (out.shape[1] - heads) // 2
    for row, position in enumerate(positions.tolist()):
        for head in range(heads + num_kv):
            if norm is not None:
                weight = norm.q_weight if head < heads else norm.k_weight
                out[row, head] = rms_norm(out[row, head], weight, norm.eps)
            out[row, head] = rotate(out[row, head], table[position])
    return out


def attention(
    queries: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """queries [T, H, D]; keys and values of each sequence [context, G, D], as stored."""
    out = torch.empty_like(queries, dtype=torch.float64)
    group = queries.shape[1] // keys[0].shape[1]
    for row, (seq, position) in enumerate(
        zip(batch.token_seq.tolist(), batch.positions.tolist(), strict=True)
    ):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            k = keys[seq][first : position + 1, head // group].double()
            v = values[seq][first : position + 1, head // group].double()
            scores = k @ queries[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            total = weights.sum()
            if sinks is not None:
                total += torch.exp(sinks[head].double() - scores.max())
            out[row, head] = weights @ v / total
    return out


def lora(x: Tensor, fused: FusedLinear, layer: int, batch: LoRABatch, factors: dict) -> Tensor:
    """What is added to y. factors[slot, layer, projection] = (A, B), absent where the rank is 0."""
    delta = torch.zeros(len(x), sum(fused.widths), dtype=torch.float64)
    bounds = batch.segment_start.tolist()
    for n, slot in enumerate(batch.segment_slot.tolist()):
        for row in range(bounds[n], bounds[n + 1]):
            pieces = []
            for projection, width in zip(fused.projections, fused.widths, strict=True):
                a, b = factors.get((slot, layer, projection), (None, None))
                piece = torch.zeros(width, dtype=torch.float64)
                if a is not None:
                    piece = x[row].double() @ a.double().T @ b.double()
                pieces.append(piece)
            delta[row] = torch.cat(pieces)
    return delta


def silu(x: Tensor) -> Tensor:
    x = x.double()
    return x / (1 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    x = x.double()
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def allowed_tokens(logits: Tensor, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Tokens that survive the filters, with their probability; logits already divided."""
    order = sorted(range(len(logits)), key=lambda t: -logits[t].item())
    if top_k > 0:
        order = order[:top_k]
    weights = {t: math.exp(logits[t].item() - logits[order[0]].item()) for t in order}
    total, kept, mass = sum(weights.values()), {}, 0.0
    for token in order:
        if top_p < 1.0 and mass >= top_p * total and kept:
            break
        kept[token] = weights[token]
        mass += weights[token]
    kept = {t: w for t, w in kept.items() if w >= min_p}
    total = sum(kept.values())
    return {t: w / total for t, w in kept.items()}
