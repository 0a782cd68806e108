from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.base import Ops, SamplingBatch
from ops.registry import select
from tests.ops import formulas
from tests.ops.interpreter import is_interpreted

VOCAB = 300


def make_batch(num_rows: int, **changes: Any) -> SamplingBatch:
    """Plain sampling at temperature 1 of `num_rows` rows; a change is a number or a tensor."""

    def fill(name: str, default: float, dtype: torch.dtype) -> Tensor:
        value = changes.pop(name, default)
        return value if isinstance(value, Tensor) else torch.full((num_rows,), value, dtype=dtype)

    floats = {
        "temperature": 1,
        "top_p": 1,
        "min_p": 0,
        "presence": 0,
        "frequency": 0,
        "repetition": 1,
    }
    longs = {"seed": 7, "choice": 0}
    ints = {"top_k": 0, "prompt_len": 0, "total_len": 0}
    fields: dict[str, Any] = {n: fill(n, d, torch.float32) for n, d in floats.items()}
    fields |= {n: fill(n, d, torch.int64) for n, d in longs.items()}
    fields |= {n: fill(n, d, torch.int32) for n, d in ints.items()}
    fields["position"] = changes.pop("position", torch.arange(num_rows))
    fields |= {
        "token_buffer": torch.zeros(num_rows, 1, dtype=torch.int32),
        "buffer_slot": torch.arange(num_rows, dtype=torch.int32),
        "bias_start": torch.zeros(num_rows + 1, dtype=torch.int32),
        "bias_ids": torch.empty(0, dtype=torch.int32),
        "bias_values": torch.empty(0),
        "has_penalties": False,
        "has_bias": False,
    }
    fields |= changes
    fields["all_greedy"] = bool((fields["temperature"] == 0).all())
    return SamplingBatch(**fields)


def bias(*rows: dict[int, float]) -> dict[str, Any]:
    return {
        "bias_start": torch.tensor([sum(map(len, rows[:i])) for i in range(len(rows) + 1)]).int(),
        "bias_ids": torch.tensor([t for row in rows for t in row], dtype=torch.int32),
        "bias_values": torch.tensor([v for row in rows for v in row.values()], dtype=torch.float32),
        "has_bias": True,
    }


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 9), vocab=st.integers(1, 500), seed=st.integers(0, 2**31))
def test_greedy_is_the_smallest_token_of_the_largest_logit(ops: Ops, rows, vocab, seed):
    torch.manual_seed(seed)
    logits = torch.randint(-4, 4, (rows, vocab)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    batch = make_batch(rows, temperature=0)
    assert ops.sample(logits.clone(), batch).tolist() == expected
    assert (
        ops.sample(logits, make_batch(rows, top_k=1, temperature=0, **bias(*[{}] * rows))).tolist()
        == expected
    )


def test_draws_follow_the_softmax(quick_ops: Ops):
    torch.manual_seed(0)
    draws, logits = 2000, torch.randn(12) * 1.5
    tokens = quick_ops.sample(logits.repeat(draws, 1), make_batch(draws, temperature=0.8))
    expected = (logits / 0.8).softmax(0) * draws
    observed = tokens.bincount(minlength=12)
    # The 99.9 % point of chi-square with 11 degrees of freedom.
    assert float(((observed - expected) ** 2 / expected).sum()) < 31.3


@pytest.mark.parametrize("key", ["seed", "position", "choice"])
def test_each_part_of_the_key_gives_independent_draws(quick_ops: Ops, key: str):
    draws = 1500
    keys = {"seed": 1, "position": torch.full((draws,), 3), key: torch.arange(draws) * 2**33 + 5}
    if key != "seed":
        keys[key] = torch.arange(draws)
    tokens = quick_ops.sample(torch.zeros(draws, 8), make_batch(draws, **keys))
    pairs = (tokens[:-1] * 8 + tokens[1:]).bincount(minlength=64)
    expected = (draws - 1) / 64
    # The 99.9 % point of chi-square with 63 degrees of freedom.
    assert float(((pairs - expected) ** 2 / expected).sum()) < 103.4


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 50, VOCAB, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
)
def test_same_tokens_on_every_backend(ops: Ops, data, temperature, top_k, top_p, min_p):
    rows, keys = 6, st.integers(-(2**63), 2**63 - 1)
    key = {
        name: torch.tensor(data.draw(st.lists(keys, min_size=rows, max_size=rows), name))
        for name in ("seed", "position", "choice")
    }
    torch.manual_seed(int(key["seed"][0]) & 0xFFFF)
    logits = torch.randn(rows, VOCAB) * 4
    if data.draw(st.booleans(), "has equal logits"):
        logits = logits.round()
    batch = make_batch(rows, **key, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = select("reference").sample(logits.clone(), batch)
    assert torch.equal(ops.sample(logits.clone(), batch), expected)


@pytest.mark.parametrize("step", [1e-3, 1.0, 1e6])
def test_filters_over_a_large_vocabulary(ops: Ops, step: float):
    """Distinct logits, steps of equal ones, and one value for all: each kind in its own row."""
    torch.manual_seed(3)
    vocab = 5_000 if is_interpreted(ops) else 20_000
    logits = torch.randn(4, vocab) * 3
    logits = (logits / step).round() * step
    options = {
        "top_k": torch.tensor([50, 0, vocab // 3, 3], dtype=torch.int32),
        "top_p": torch.tensor([0.9, 0.5, 0.999, 1.0]),
        "temperature": torch.tensor([1.0, 0.5, 1.5, 1.0]),
    }
    batch = make_batch(4, **options)
    expected = select("reference").sample(logits.clone(), batch)
    assert torch.equal(ops.sample(logits, batch), expected)


@pytest.mark.parametrize("temperature", [0.2, 0.02])
def test_filters_where_most_tokens_are_far_below_the_largest(ops: Ops, temperature: float):
    """At a low temperature the tokens that top-k keeps are among those that are never drawn."""
    torch.manual_seed(4)
    vocab = 5_000 if is_interpreted(ops) else 20_000
    logits = torch.randn(4, vocab) * 3
    logits[3, 50:] = float("-inf")
    options = {
        "top_k": torch.tensor([50, 3, vocab // 3, 200], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.9, 0.999, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.01, 0.0]),
    }
    batch = make_batch(4, **options, temperature=temperature)
    expected = select("reference").sample(logits.clone(), batch)
    assert torch.equal(ops.sample(logits, batch), expected)


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    top_k=st.sampled_from([0, 2, 40]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_only_survivors_of_the_filters_are_drawn(quick_ops: Ops, seed, spread, top_k, top_p, min_p):
    torch.manual_seed(seed)
    logits = torch.randn(VOCAB) * spread
    allowed = formulas.allowed_tokens(logits, top_k, top_p, min_p)
    batch = make_batch(60, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = set(quick_ops.sample(logits.repeat(60, 1), batch).tolist())
    assert drawn <= set(allowed)
    likely = {token for token, probability in allowed.items() if probability > 0.3}
    assert likely <= drawn


def test_neighbours_do_not_change_a_draw(ops: Ops):
    torch.manual_seed(0)
    logits = torch.randn(8, VOCAB)
    options = {
        "temperature": torch.tensor([0.0, 1, 2, 0.5, 1, 1, 1, 1]),
        "top_k": torch.tensor([0, 0, 5, 9, 0, 0, 300, 1], dtype=torch.int32),
        "top_p": torch.tensor([1, 0.5, 1, 1, 0.9, 1, 0, 1]),
        "min_p": torch.tensor([0.0, 0, 0, 0, 0, 0.2, 0, 0]),
    }
    together = ops.sample(logits.clone(), make_batch(8, **options))
    assert together[6] == logits[6].argmax()
    for row in range(8):
        one = {name: value[row : row + 1] for name, value in options.items()}
        alone = make_batch(1, **one, position=torch.tensor([row]))
        assert ops.sample(logits[row : row + 1].clone(), alone).item() == together[row]


def test_bias_bans_and_forces(ops: Ops):
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 10
    rules = bias({5: -math.inf, 9: 1.0}, {}, {290: 100.0})
    batch = make_batch(3, temperature=0, **rules)
    assert ops.sample(logits.clone(), batch).tolist() == [9, 5, 290]
    banned = bias(*[{t: -math.inf for t in range(VOCAB) if t != 17}] * 3)
    assert ops.sample(logits, make_batch(3, top_p=0.5, **banned)).tolist() == [17] * 3


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_row_with_logits_that_are_no_numbers_gets_no_token(ops: Ops, temperature, top_k):
    """One of them is enough, wherever it is; the rows beside it get theirs."""
    vocab = 2500
    torch.manual_seed(0)
    logits = torch.randn(6, vocab)
    batch = make_batch(6, temperature=temperature, top_k=top_k)
    expected = ops.sample(logits.clone(), batch)
    for row, broken in enumerate([[0], [vocab - 1], [2047], range(vocab)], start=1):
        logits[row, list(broken)] = math.nan
        expected[row] = -1
    logits[5, 7] = math.inf
    expected[5] = 7
    assert torch.equal(ops.sample(logits, batch), expected)


def test_penalties_count_the_rows_tokens(ops: Ops):
    buffer = torch.tensor([[0] * 6, [3, 3, 4, 5, 5, 9], [18] * 6], dtype=torch.int32)
    lengths = {
        "token_buffer": buffer,
        "buffer_slot": torch.tensor([1, 2], dtype=torch.int32),
        "prompt_len": torch.tensor([2, 1], dtype=torch.int32),
        "total_len": torch.tensor([5, 3], dtype=torch.int32),
        "has_penalties": True,
    }
    values = {"presence": 0.5, "frequency": 0.25, "repetition": 2.0}
    logits = torch.ones(2, 19)
    logits[:, 4] = -1.0
    expected = logits.clone()
    # Row 0: prompt 3 3, generated 4 5 5. Row 1: prompt 18, generated 18 18.
    expected[0, 3], expected[0, 4], expected[0, 5] = 0.5, -2.0 - 0.75, 0.5 - 1.0
    expected[1, 18] = 0.5 - 0.5 - 0.5
    batch = make_batch(2, temperature=1, **values, **lengths)
    ops.sample(logits, batch)
    torch.testing.assert_close(logits, expected)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), vocab=st.integers(20, 700), top=st.integers(0, 20))
def test_log_softmax_top(ops: Ops, rows, vocab, top):
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab) * 6
    logits[:, 3] = logits[:, 11]
    before = logits.clone()
    tokens = torch.randint(0, vocab, (rows,), dtype=torch.int32)
    chosen, ids, values = ops.log_softmax_top(logits, tokens, top)
    assert torch.equal(logits, before)
    expected = logits.double().log_softmax(-1)
    order = [
        sorted(range(vocab), key=lambda t, r=r: (-logits[r, t].item(), t))[:top]
        for r in range(rows)
    ]
    assert ids.tolist() == order
    torch.testing.assert_close(
        values.double(), expected.gather(1, ids.long()), rtol=1e-5, atol=1e-5
    )
    picked = expected.gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(chosen.double(), picked, rtol=1e-5, atol=1e-5)


def test_bias_of_ids_outside_the_vocabulary_changes_nothing(ops: Ops):
    """Neither the neighbouring rows nor the memory beyond them."""
    vocab = 300
    memory = torch.zeros(4, vocab)
    memory[:, 7] = 1.0
    ids = (-vocab - 1, -1, vocab, vocab + 7, 2 * vocab - 1)
    rows = [dict.fromkeys(ids, 50.0), {5: 2.0}]
    tokens = ops.sample(memory[1:3], make_batch(2, temperature=0, **bias(*rows)))
    assert tokens.tolist() == [7, 5]
    assert not memory[0, :7].any() and not memory[3, :7].any(), (
        "memory around the rows is as it was"
    )
    assert (memory[[0, 3]] != 0).sum() == 2
