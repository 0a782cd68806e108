"""Sampling in Triton: one draw per row by the Gumbel-max rule, without softmax or sort.

Without filters, the `N * V * 4` bytes of the logits are read once (128 rows of 128256: 66 MB, 15 us
at 4.3 TB/s). Rows with top-k or top-p are usually read up to four more times, see
`ops.triton_threshold`. Rows without either are not read again.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.base import SamplingBatch
from ops.triton_table import blocks_of, power_of_two
from ops.triton_threshold import find_lowest

NO_TOKEN = tl.constexpr(2**31 - 1)


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Semantics: as Ops.sample.  Shape: logits float32 [N, V] -> int32 [N]. Adds bias and
    penalties to `logits` in place.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return tokens
    if batch.has_bias:
        _add_bias[(rows,)](
            *(logits, batch.bias_start, batch.bias_ids, batch.bias_values, vocab),
            BLOCK=256,
            num_warps=2,
        )
    if batch.has_penalties:
        bins = min(power_of_two(vocab), 1024)
        _penalise[(rows, blocks_of(vocab, bins))](
            *(logits, batch.presence, batch.frequency, batch.repetition, batch.token_buffer),
            *(batch.token_buffer.stride(0), batch.buffer_slot, batch.prompt_len, batch.total_len),
            *(vocab,),
            BINS=bins,
            BLOCK=1024,
            num_warps=4,
        )
    if batch.all_greedy:
        lowest = logits.new_full((rows,), float("-inf"))
    else:
        lowest = find_lowest(logits, batch)
    block = min(power_of_two(vocab), 2048)
    chunks = blocks_of(vocab, block)
    scores = logits.new_empty(rows, chunks)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _draw[(rows, chunks)](
        *(logits, batch.temperature, lowest, batch.seed, batch.position, batch.choice),
        *(scores, ids, vocab),
        BLOCK=block,
        num_warps=4,
    )
    _pick[(rows,)](scores, ids, tokens, chunks, vocab, BLOCK=power_of_two(chunks), num_warps=1)
    return tokens


@triton.jit
def _add_bias(logits, bias_start, bias_ids, bias_values, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(bias_start + row + 1)
    for first in range(tl.load(bias_start + row), end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        known = entry < end
        token = tl.load(bias_ids + entry, mask=known, other=0)
        value = tl.load(bias_values + entry, mask=known, other=0)
        inside = known & (token >= 0) & (token < vocab)
        # The addition is atomic because a token may have two entries.
        tl.atomic_add(logits + row * vocab + token, value, mask=inside, sem="relaxed")


@triton.jit
def _penalise(
    logits,
    presence,
    frequency,
    repetition,
    token_buffer,
    buffer_stride,
    buffer_slot,
    prompt_len,
    total_len,
    vocab,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the prompt and generated tokens of a row that are in a span of the vocabulary, and
    penalises their logits. A program processes one row and span."""
    row = tl.program_id(0).to(tl.int64)
    present, frequent = tl.load(presence + row), tl.load(frequency + row)
    repeated = tl.load(repetition + row)
    if (present == 0) & (frequent == 0) & (repeated == 1):
        return
    first_token = tl.program_id(1) * BINS
    prompt, total = tl.load(prompt_len + row), tl.load(total_len + row)
    tokens = token_buffer + tl.load(buffer_slot + row).to(tl.int64) * buffer_stride
    seen = tl.zeros((BINS,), tl.int32)
    generated = tl.zeros((BINS,), tl.int32)
    for first in range(0, total, BLOCK):
        at = first + tl.arange(0, BLOCK)
        bin = tl.load(tokens + at, mask=at < total, other=-1) - first_token
        ours = (at < total) & (bin >= 0) & (bin < BINS)
        seen += tl.histogram(bin, BINS, mask=ours)
        generated += tl.histogram(bin, BINS, mask=ours & (at >= prompt))
    token = first_token + tl.arange(0, BINS)
    changed = (token < vocab) & (seen > 0)
    logit = tl.load(logits + row * vocab + token, mask=changed, other=0)
    logit = tl.where(logit > 0, tl.div_rn(logit, repeated), logit * repeated)
    lowered = logit - (frequent * generated.to(tl.float32) + present)
    logit = tl.where(generated > 0, lowered, logit)
    tl.store(logits + row * vocab + token, logit, mask=changed)


@triton.jit
def _mix(x):
    """Computes the 32-bit hash `lowbias32` (C. Wellons, hash-prospector)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _low_word(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _gumbel(token, seed, position, choice):
    """Returns the same noise as ops.reference.gumbel_noise, from identical integers."""
    low = _mix(_low_word(seed) ^ 0x9E3779B9)
    high = _mix(_low_word(seed) ^ 0x85EBCA6B)
    low, high = _mix(low ^ _low_word(seed >> 32)), _mix(high ^ _low_word(seed >> 32))
    low, high = _mix(low ^ _low_word(position)), _mix(high ^ _low_word(position))
    low, high = _mix(low ^ _low_word(choice)), _mix(high ^ _low_word(choice))
    bits = _mix(_mix(token.to(tl.uint32) ^ low) + high)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _draw(
    logits,
    temperatures,
    lowest,
    seeds,
    positions,
    choices,
    scores,
    ids,
    vocab,
    BLOCK: tl.constexpr,
):
    """Stores the best score of a span of the vocabulary, and the smallest token that has it. Stores
    infinity and -1 if a logit of the span is NaN."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    known = token < vocab
    score = tl.load(logits + row * vocab + token, mask=known, other=float("-inf"))
    is_broken = tl.max((score != score).to(tl.int32), axis=0) > 0
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        score = tl.div_rn(score, temperature)
        noise = _gumbel(
            token, tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
        )
        score = tl.where(score >= tl.load(lowest + row), score + noise, float("-inf"))
    best = tl.max(score, axis=0)
    at = row * tl.num_programs(1) + chunk
    winner = tl.min(tl.where(known & (score == best), token, NO_TOKEN), axis=0)
    tl.store(scores + at, tl.where(is_broken, float("inf"), best))
    tl.store(ids + at, tl.where(is_broken, -1, winner))


@triton.jit
def _pick(scores, ids, tokens, chunks, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    known = chunk < chunks
    score = tl.load(scores + row * chunks + chunk, mask=known, other=float("-inf"))
    token = tl.load(ids + row * chunks + chunk, mask=known, other=NO_TOKEN)
    best = tl.max(score, axis=0)
    tl.store(tokens + row, tl.min(tl.where(known & (score == best), token, NO_TOKEN), axis=0))
