"""The logit below which top-k, top-p and min-p drop a token, found without a sort.

Floats are mapped to integers of the same order. The weight above a candidate (a count for top-k,
exp(logit - max) for top-p) falls as the candidate rises, so the smallest one that has less than
the target above it is found digit by digit: eight passes over the row, 16 candidates a pass. It
is a logit of the row, and whatever equals it stays.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ordered(x):
    """uint32 in the order of the float32 (-0.0 before 0.0)."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """The float32 whose `_ordered` this is."""
    bits = key.to(tl.int32, bitcast=True) ^ -2147483648
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(row, first, vocab, temperature, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    value = tl.load(row + token, mask=token < vocab, other=float("-inf"))
    return tl.div_rn(value, temperature)


@triton.jit
def _search(
    row, vocab, temperature, largest, floor, target, IS_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest logit with less than `target` of weight above it, among logits >= floor; NaN
    where even the largest has more."""
    digit = tl.arange(0, 16).to(tl.uint32)
    prefix = tl.zeros((1,), tl.uint32)
    for step in range(8):
        shift = 28 - 4 * step
        # Everything that begins with the prefix and a digit is at most this.
        bound = prefix + (digit << shift) + ((1 << shift) - 1)
        above = tl.zeros((16,), tl.float64)
        for first in range(0, vocab, BLOCK):
            value = _scaled(row, first, vocab, temperature, BLOCK)
            if IS_MASS:
                weight = tl.where(value >= floor, tl.exp(value - largest), 0.0)
            else:
                weight = tl.full((BLOCK,), 1.0, tl.float32)
            counted = tl.where(_ordered(value)[:, None] > bound[None, :], weight[:, None], 0.0)
            above += tl.sum(counted, axis=0).to(tl.float64)
        passed = tl.sum((above >= target).to(tl.int32), axis=0)
        prefix += tl.minimum(passed, 15).to(tl.uint32) << shift
    return tl.sum(_value(prefix), axis=0)


@triton.jit
def threshold(logits, temperatures, top_ks, top_ps, min_ps, lowest, vocab, BLOCK: tl.constexpr):
    """Semantics: lowest[n] = the smallest logit / temperature of row n that its filters keep.
    Rows that are greedy or have no filter keep what stands there.
    Shape: logits float32 [N, V], lowest float32 [N]; one program a row.
    """
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + index)
    top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if (temperature == 0) | ((not has_top_k) & (top_p >= 1) & (min_p <= 0)):
        return
    row = logits + index * vocab
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        best = tl.maximum(best, _scaled(row, first, vocab, temperature, BLOCK))
    largest = tl.max(best, axis=0)
    kept = largest - float("inf")
    if has_top_k:
        kept = _search(row, vocab, temperature, largest, kept, top_k, False, BLOCK)
    if top_p < 1:
        total = tl.zeros((1,), tl.float64)
        for first in range(0, vocab, BLOCK):
            value = _scaled(row, first, vocab, temperature, BLOCK)
            weight = tl.where(value >= kept, tl.exp(value - largest), 0.0)
            total += tl.sum(weight, axis=0).to(tl.float64)
        target = total * top_p
        # With a target of nothing no key qualifies, and the largest logit stays.
        found = _search(row, vocab, temperature, largest, kept, target, True, BLOCK)
        kept = tl.maximum(kept, tl.where(found <= largest, found, largest))
    if min_p > 0:
        kept = tl.maximum(kept, largest + tl.log(min_p))
    tl.store(lowest + index, kept)
