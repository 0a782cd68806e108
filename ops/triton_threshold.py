"""Finds, without a sort, the logit below which top-k, top-p and min-p drop a token.

Logits are counted into bins by their distance from the row's largest. The counts show which bin
contains the threshold. The few logits of that bin are collected, and the threshold is found among
them exactly, digit by digit. Programs that share a row combine their results by atomic sums of
integers, whose order does not matter, so a row's threshold depends neither on other rows nor on
timing.

Weights of top-p are exp(logit - largest) in units of 2^-40, stored as int64.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.base import SamplingBatch
from ops.triton_table import blocks_of, power_of_two

BINS = 2048
BINS_A_UNIT = tl.constexpr(64.0)
"""Number of bins per unit of logit. The last bin holds all logits 32 or more below the largest.
Their weight is negligible, and they are never drawn, because the noise of two tokens differs by
less than 20."""
UNIT_WEIGHT = tl.constexpr(float(1 << 40))
"""Weight of the largest logit for top-p. The sum of 2^22 weights fits an int64."""
CAPACITY = 4096
"""Maximum number of collected logits of a bin. If the bin has more, the whole row is searched."""


def find_lowest(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Semantics: lowest[n] = the smallest logit / temperature of row n that its filters keep, -inf
    for rows that are greedy or have no filter.
    Shape: logits float32 [N, V] -> float32 [N].

    Bytes: a row with both filters is read 4 times (largest, bins, two collections), by V / 4096
    programs; 128 rows of 128256: 263 MB, 61 us at 4.3 TB/s if nothing stays in the L2.
    """
    rows, vocab = logits.shape
    lowest = logits.new_full((rows,), float("-inf"))
    block = min(power_of_two(vocab), 4096)
    spans = blocks_of(vocab, block)
    maxima = logits.new_empty(rows, spans)
    counts = torch.zeros(rows, BINS, dtype=torch.int64, device=logits.device)
    weights = torch.zeros_like(counts)
    chosen = torch.empty(rows, 3, dtype=torch.int64, device=logits.device)
    collected = logits.new_empty(rows, CAPACITY)
    num_collected = [torch.zeros(rows, dtype=torch.int32, device=logits.device) for _ in range(2)]
    temperature, top_k, top_p = batch.temperature, batch.top_k, batch.top_p
    filters = (temperature, top_k, top_p, batch.min_p)
    row_of = (maxima, vocab, spans)
    size: dict[str, Any] = {"SPANS": power_of_two(spans), "BINS": BINS}
    by_span: dict[str, Any] = {**size, "BLOCK": block}
    by_row: dict[str, Any] = {**size, "BLOCK": 1024}
    _find_maxima[(rows, spans)](logits, *filters, maxima, vocab, BLOCK=block, num_warps=4)
    _fill_bins[(rows, spans)](
        *(logits, temperature, top_k, top_p, *row_of, counts, weights), **by_span, num_warps=8
    )
    _choose_by_count[(rows,)](temperature, top_k, vocab, counts, chosen, BINS=BINS, num_warps=4)
    first, second = ((chosen, collected, number) for number in num_collected)
    options: dict[str, Any] = {"CAPACITY": CAPACITY, "num_warps": 8}
    _collect[(rows, spans)](logits, temperature, *row_of, *first, **(by_span | options))
    _resolve_by_count[(rows,)](
        *(logits, temperature, top_p, *row_of, *first, counts, weights, lowest),
        **(by_row | options),
    )
    _collect[(rows, spans)](logits, temperature, *row_of, *second, **(by_span | options))
    _resolve_by_weight[(rows,)](*(logits, *filters, *row_of, *second, lowest), **(by_row | options))
    return lowest


@triton.jit
def _ordered(x):
    """Maps float32 to uint32 in the same order (-0.0 before 0.0)."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """Maps a key of `_ordered` back to its float32."""
    bits = key.to(tl.int32, bitcast=True) ^ -2147483648
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_filtered(row, temperatures, top_ks, top_ps, min_ps, vocab):
    top_k = tl.load(top_ks + row)
    has_filter = ((top_k > 0) & (top_k < vocab)) | (tl.load(top_ps + row) < 1)
    return (tl.load(temperatures + row) != 0) & (has_filter | (tl.load(min_ps + row) > 0))


@triton.jit
def _scaled(values, at, known, temperature):
    return tl.div_rn(tl.load(values + at, mask=known, other=float("-inf")), temperature)


@triton.jit
def _largest(maxima, row, spans, SPANS: tl.constexpr):
    span = tl.arange(0, SPANS)
    known = span < spans
    return tl.max(tl.load(maxima + row * spans + span, mask=known, other=float("-inf")), axis=0)


@triton.jit
def _bin(value, largest, BINS: tl.constexpr):
    """Returns the index of the value's bin as int32. Smaller values have larger indices. A NaN also
    gets a valid index."""
    below = (largest - value) * BINS_A_UNIT
    near = (below < BINS - 1) & (value != largest)
    return tl.where(value == largest, 0, tl.where(near, below, BINS - 1.0).to(tl.int32))


@triton.jit
def _weight(value, largest):
    share = tl.where(value == largest, 1.0, tl.exp(value - largest))
    return (tl.where(share == share, share, 0.0) * UNIT_WEIGHT).to(tl.int64)


@triton.jit
def _find_maxima(logits, temperatures, top_ks, top_ps, min_ps, maxima, vocab, BLOCK: tl.constexpr):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not _is_filtered(row, temperatures, top_ks, top_ps, min_ps, vocab):
        return
    token = span * BLOCK + tl.arange(0, BLOCK)
    value = _scaled(logits + row * vocab, token, token < vocab, tl.load(temperatures + row))
    tl.store(maxima + row * tl.num_programs(1) + span, tl.max(value, axis=0))


@triton.jit
def _fill_bins(
    logits,
    temperatures,
    top_ks,
    top_ps,
    maxima,
    vocab,
    spans,
    counts,
    weights,
    SPANS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fills counts and weights, int64 [N, BINS], which must be zero on entry. Does not count the
    last bin, because at low temperatures it has nearly all tokens, and their atomic additions would
    contend for one address."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    temperature = tl.load(temperatures + row)
    if (temperature == 0) | ((not has_top_k) & (top_p >= 1)):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = token < vocab
    value = _scaled(logits + row * vocab, token, known, temperature)
    largest = _largest(maxima, row, spans, SPANS)
    bin = _bin(value, largest, BINS)
    known &= bin < BINS - 1
    at = row * BINS + bin
    tl.atomic_add(counts + at, tl.full((BLOCK,), 1, tl.int64), mask=known, sem="relaxed")
    if top_p < 1:
        weight = _weight(value, largest)
        tl.atomic_add(weights + at, weight, mask=known & (weight > 0), sem="relaxed")


@triton.jit
def _counts_of(counts, row, vocab, BINS: tl.constexpr):
    """Returns the counts int64 [BINS]. The last bin's count, which is not stored, is computed."""
    bin = tl.arange(0, BINS)
    count = tl.load(counts + row * BINS + bin)
    return tl.where(bin == BINS - 1, vocab - tl.sum(count, axis=0), count)


@triton.jit
def _last_bin(count, weight, target, BINS: tl.constexpr):
    """Returns the last non-empty bin that has less than `target` weight in the bins before it, and
    the weight in these bins. Returns bin -1 if there is none."""
    bin = tl.arange(0, BINS)
    above = tl.cumsum(weight, axis=0) - weight
    chosen = tl.max(tl.where((count > 0) & (above < target), bin, -1), axis=0)
    return chosen, tl.sum(tl.where(bin < chosen, weight, 0), axis=0)


@triton.jit
def _choose_by_count(temperatures, top_ks, vocab, counts, chosen, BINS: tl.constexpr):
    """Finds the bin in which top-k ends. Writes chosen int64 [N, 3]: bin (-1 = no search needed),
    number of logits in the bins before it, target count."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    if (tl.load(temperatures + row) != 0) & (top_k > 0) & (top_k < vocab):
        count = _counts_of(counts, row, vocab, BINS)
        bin, above = _last_bin(count, count, top_k, BINS)
        # The last bin is not searched, because none of its tokens could be drawn.
        tl.store(chosen + row * 3, tl.where(bin == BINS - 1, -1, bin))
        tl.store(chosen + row * 3 + 1, above)
        tl.store(chosen + row * 3 + 2, top_k.to(tl.int64))
    else:
        tl.store(chosen + row * 3, -1)


@triton.jit
def _collect(
    logits,
    temperatures,
    maxima,
    vocab,
    spans,
    chosen,
    collected,
    num_collected,
    SPANS: tl.constexpr,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes collected float32 [N, CAPACITY]: the logits of the chosen bin, in any order."""
    row = tl.program_id(0).to(tl.int64)
    bin = tl.load(chosen + row * 3)
    if bin < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = token < vocab
    logit = tl.load(logits + row * vocab + token, mask=known, other=float("-inf"))
    value = tl.div_rn(logit, tl.load(temperatures + row))
    wanted = known & (_bin(value, _largest(maxima, row, spans, SPANS), BINS) == bin)
    number = wanted.to(tl.int32)
    first = tl.atomic_add(num_collected + row, tl.sum(number, axis=0), sem="relaxed")
    to = first + tl.cumsum(number, axis=0) - 1
    tl.store(collected + row * CAPACITY + to, logit, mask=wanted & (to < CAPACITY))


@triton.jit
def _search(
    values,
    num_values,
    temperature,
    largest,
    floor,
    bin,
    above,
    target,
    IS_WEIGHT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the smallest logit of the bin that is at least `floor`, and for which the weight of
    all larger logits is less than `target`. above: weight of the bins before this one. IS_WEIGHT:
    whether logits have the weights of top-p; otherwise each logit has weight 1."""
    digit = tl.arange(0, 16).to(tl.uint32)
    prefix = tl.zeros((1,), tl.uint32)
    for step in range(8):
        shift = 28 - 4 * step
        # The largest key that begins with the prefix and this digit.
        bound = prefix + (digit << shift) + ((1 << shift) - 1)
        higher = tl.zeros((16,), tl.int64) + above
        for first in range(0, num_values, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = _scaled(values, at, at < num_values, temperature)
            ours = (at < num_values) & (value >= floor) & (_bin(value, largest, BINS) == bin)
            weight = ours.to(tl.int64)
            if IS_WEIGHT:
                weight *= _weight(value, largest)
            is_higher = _ordered(value)[:, None] > bound[None, :]
            higher += tl.sum(tl.where(is_higher, weight[:, None], 0), axis=0)
        passed = tl.sum((higher >= target).to(tl.int32), axis=0)
        prefix += tl.minimum(passed, 15).to(tl.uint32) << shift
    return tl.sum(_value(prefix), axis=0)


@triton.jit
def _resolve_by_count(
    logits,
    temperatures,
    top_ps,
    maxima,
    vocab,
    spans,
    chosen,
    collected,
    num_collected,
    counts,
    weights,
    lowest,
    SPANS: tl.constexpr,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the smallest logit that top-k keeps. Then, among the logits that top-k keeps, stores
    the bin with the smallest logit that top-p keeps."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    largest = _largest(maxima, row, spans, SPANS)
    bin = tl.load(chosen + row * 3)
    number = tl.arange(0, BINS)
    weight = tl.load(weights + row * BINS + number)
    if bin >= 0:
        above, target = tl.load(chosen + row * 3 + 1), tl.load(chosen + row * 3 + 2)
        values, num_values = collected + row * CAPACITY, tl.load(num_collected + row)
        if num_values > CAPACITY:
            values, num_values = logits + row * vocab, vocab
        kept = _search(
            *(values, num_values, temperature, largest, float("-inf"), bin, above, target),
            IS_WEIGHT=False,
            BINS=BINS,
            BLOCK=BLOCK,
        )
        tl.store(lowest + row, kept)
        inside = tl.zeros((1,), tl.int64)
        for first in range(0, num_values, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = _scaled(values, at, at < num_values, temperature)
            ours = (at < num_values) & (value >= kept) & (_bin(value, largest, BINS) == bin)
            inside += tl.sum(tl.where(ours, _weight(value, largest), 0), axis=0)
        weight = tl.where(number == bin, tl.sum(inside, axis=0), weight)
        weight = tl.where(number > bin, 0, weight)
    tl.store(chosen + row * 3, -1)
    if (temperature != 0) & (top_p < 1):
        count = _counts_of(counts, row, vocab, BINS)
        if bin >= 0:
            count = tl.where(number > bin, 0, count)
        # The target is at least one unit, so that the largest logit is kept for every top_p.
        share = (tl.sum(weight, axis=0).to(tl.float64) * top_p).to(tl.int64)
        share = tl.maximum(share, 1)
        cut, above_cut = _last_bin(count, weight, share, BINS)
        tl.store(chosen + row * 3, cut)
        tl.store(chosen + row * 3 + 1, above_cut)
        tl.store(chosen + row * 3 + 2, share)


@triton.jit
def _resolve_by_weight(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    maxima,
    vocab,
    spans,
    chosen,
    collected,
    num_collected,
    lowest,
    SPANS: tl.constexpr,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the smallest logit that remains after top-k, top-p and min-p."""
    row = tl.program_id(0).to(tl.int64)
    if not _is_filtered(row, temperatures, top_ks, top_ps, min_ps, vocab):
        return
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    largest = _largest(maxima, row, spans, SPANS)
    kept = tl.load(lowest + row)
    bin = tl.load(chosen + row * 3)
    if bin >= 0:
        above, target = tl.load(chosen + row * 3 + 1), tl.load(chosen + row * 3 + 2)
        values, num_values = collected + row * CAPACITY, tl.load(num_collected + row)
        if num_values > CAPACITY:
            values, num_values = logits + row * vocab, vocab
        found = _search(
            *(values, num_values, temperature, largest, kept, bin, above, target),
            IS_WEIGHT=True,
            BINS=BINS,
            BLOCK=BLOCK,
        )
        kept = tl.maximum(kept, tl.where(found <= largest, found, largest))
    if min_p > 0:
        kept = tl.maximum(kept, largest + tl.log(min_p))
    tl.store(lowest + row, kept)
