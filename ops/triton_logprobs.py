"""Computes log-probabilities of a few tokens of each row, without storing a softmax.

A first launch reduces each span of the vocabulary to its maximum, its sum and its best tokens. A
second launch merges the spans of a row. Logits, `N * V * 4` bytes, are read once.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton_sampling import NO_TOKEN
from ops.triton_table import blocks_of, power_of_two

USUAL_TOP = 20
"""Number of top tokens up to which all requests use the same compiled kernel."""


def log_softmax_top(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Semantics: as Ops.log_softmax_top.
    Shape: logits float32 [N, V], tokens int32 [N] -> chosen float32 [N], ids int32 [N, num_top],
    values float32 [N, num_top], descending, the smaller id first among equals.
    """
    rows, vocab = logits.shape
    assert num_top <= vocab
    block = min(power_of_two(vocab), 2048)
    chunks = blocks_of(vocab, block)
    # These are separate tensors, because the second half of one tensor could have another
    # alignment, for which Triton would compile another kernel.
    maxima, sums = logits.new_empty(rows, chunks), logits.new_empty(rows, chunks)
    values = logits.new_empty(rows, chunks, num_top)
    ids = torch.empty(rows, chunks, num_top, dtype=torch.int32, device=logits.device)
    chosen, top_values = logits.new_empty(rows), logits.new_empty(rows, num_top)
    top_ids = ids.new_empty(rows, num_top)
    if rows:
        _reduce_span[(rows, chunks)](
            logits, maxima, sums, values, ids, vocab, num_top, BLOCK=block, num_warps=4
        )
        _merge_spans[(rows,)](
            *(logits, tokens, maxima, sums, values, ids, chosen, top_ids, top_values),
            *(vocab, chunks, num_top),
            SPANS=power_of_two(chunks),
            CANDIDATES=power_of_two(chunks * max(num_top, USUAL_TOP)),
            num_warps=4,
        )
    return chosen, top_ids, top_values


@triton.jit
def _next(value, token, last_value, last_token):
    """Returns the best (value, token) that comes after (last_value, last_token) in descending
    order, with the smaller token first among equal values. The token is NO_TOKEN if there is
    none."""
    after = (value < last_value) | ((value == last_value) & (token > last_token))
    after = after & (token != NO_TOKEN)
    best = tl.max(tl.where(after, value, float("-inf")), axis=0)
    return best, tl.min(tl.where(after & (value == best), token, NO_TOKEN), axis=0)


@triton.jit(do_not_specialize=("num_top",))
def _reduce_span(logits, maxima, sums, values, ids, vocab, num_top, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    known = token < vocab
    value = tl.load(logits + row * vocab + token, mask=known, other=float("-inf"))
    token = tl.where(known, token, NO_TOKEN)
    at = row * tl.num_programs(1) + chunk
    largest = tl.max(value, axis=0)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(maxima + at, largest)
    tl.store(sums + at, tl.sum(tl.exp(value - origin), axis=0))
    best, winner = largest + float("inf"), tl.min(token, axis=0) * 0 - 1
    for rank in range(num_top):
        best, winner = _next(value, token, best, winner)
        tl.store(values + at * num_top + rank, best)
        tl.store(ids + at * num_top + rank, winner)


@triton.jit(do_not_specialize=("num_top",))
def _merge_spans(
    logits,
    tokens,
    maxima,
    sums,
    values,
    ids,
    chosen,
    top_ids,
    top_values,
    vocab,
    chunks,
    num_top,
    SPANS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    known = span < chunks
    largest = tl.load(maxima + row * chunks + span, mask=known, other=float("-inf"))
    total = tl.load(sums + row * chunks + span, mask=known, other=0)
    highest = tl.max(largest, axis=0)
    log_total = tl.log(tl.sum(total * tl.exp(largest - highest), axis=0))
    token = tl.load(tokens + row)
    logit = tl.load(logits + row * vocab + token)
    tl.store(chosen + row, logit - highest - log_total)

    candidate = tl.arange(0, CANDIDATES)
    offered = candidate < chunks * num_top
    at = row * chunks * num_top + candidate
    value = tl.load(values + at, mask=offered, other=float("-inf"))
    name = tl.load(ids + at, mask=offered, other=NO_TOKEN)
    best, winner = highest + float("inf"), token * 0 - 1
    for rank in range(num_top):
        best, winner = _next(value, name, best, winner)
        tl.store(top_values + row * num_top + rank, best - highest - log_total)
        tl.store(top_ids + row * num_top + rank, winner)
