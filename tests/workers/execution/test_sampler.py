"""The sampler alone: masks, bans, and log-probabilities of the samples that ask, of the tokens
that they ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.base import Ops
from ops.cpu import CpuOps
from ops.reference import ReferenceOps
from workers.execution import scores as scoring
from workers.execution.sampler import Sampler
from workers.execution.scores import score_prompts
from workers.execution.step_input import Array, SampleInput, ScoreInput, StepInput
from workers.wire.protocol import ALL_TOKENS, SamplingParams

VOCAB = 40


def step_of(samples: list[SampleInput]) -> StepInput:
    count = len(samples)
    return StepInput(
        sequence_slots=np.arange(count),
        adapter_slots=np.full(count, -1, np.int32),
        starts=np.zeros(count, np.int32),
        counts=np.full(count, 4, np.int32),
        block_tables=np.zeros((count, 1), np.int64),
        max_rank=0,
        samples=samples,
        scores=[],
    )


def test_a_mask_and_a_ban_hold_for_their_sample_and_scores_are_of_samples_that_ask() -> None:
    ops, buffer = ReferenceOps(), torch.zeros(4, 8, dtype=torch.int32)
    mask = np.zeros(2, np.int32)
    mask[1] = 1 << 5 | 1 << 2  # tokens 34 and 37
    plain = SamplingParams(4, 0, temperature=0.0)
    asking = SamplingParams(4, 0, temperature=0.0, logprobs=1)
    step = step_of(
        [
            SampleInput(0, 4, 4, plain, frozenset()),
            SampleInput(1, 4, 4, asking, frozenset(), mask),
            SampleInput(2, 4, 4, plain, frozenset([39])),
            SampleInput(3, 4, 4, asking, frozenset()),
        ]
    )
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(4, 1)
    sampler = Sampler(ops, buffer)
    inputs = sampler.upload(step)
    expected = logits[0].log_softmax(0)
    drawn = sampler.draw(logits, inputs)
    tokens, scores = drawn.tokens, drawn.scores
    assert tokens.tolist() == [39, 37, 38, 39]
    assert buffer[:, 4].tolist() == [39, 37, 38, 39]
    assert scores is not None
    masked, last = scores.read()
    assert (masked.token, last.token) == (37, 39), "the samples that ask, and no others"
    torch.testing.assert_close(masked.logprob, float(expected[37]))
    assert masked.top[0][0] == 39, "log-probabilities are of the logits before the mask"


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=["reference", "cpu"])
def test_each_sample_is_told_the_tokens_that_it_asks_for(ops: Ops) -> None:
    """The likeliest, all, or those that it names, in its order; other rows change nothing."""
    asked = [
        SamplingParams(4, 0, temperature=0.0, logprobs=2),
        SamplingParams(4, 0, temperature=0.0, logprobs=0, logprob_token_ids=(7, 3, 39)),
        SamplingParams(4, 0, temperature=0.0),
        SamplingParams(4, 0, temperature=0.0, logprobs=ALL_TOKENS),
        SamplingParams(4, 0, temperature=0.0, logprobs=1, logprob_token_ids=(0,)),
    ]
    samples = [SampleInput(row, 4, 4, each, frozenset()) for row, each in enumerate(asked)]
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    wanted = logits.log_softmax(-1)
    sampler = Sampler(ops, torch.zeros(len(asked), 8, dtype=torch.int32))
    drawn = sampler.draw(logits.clone(), sampler.upload(step_of(samples)))
    tokens, scores = drawn.tokens, drawn.scores
    assert scores is not None
    told = dict(zip((0, 1, 3, 4), scores.read(), strict=True))
    for row, entry in told.items():
        assert entry.token == tokens[row] == wanted[row].argmax()
        for token, logprob in [(entry.token, entry.logprob), *entry.top]:
            assert logprob == pytest.approx(float(wanted[row, token]), abs=1e-5)
    ranked = {row: wanted[row].argsort(descending=True).tolist() for row in told}
    assert [token for token, _ in told[0].top] == ranked[0][:2]
    assert [token for token, _ in told[1].top] == [7, 3, 39]
    assert [token for token, _ in told[3].top] == ranked[3]
    assert [token for token, _ in told[4].top] == [0]


def test_a_long_prompt_is_scored_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its logits fit into memory that no request was promised."""
    scores = [ScoreInput(0, [3, 1, 2], 2), ScoreInput(1, [7, 8, 9, 10], 1)]
    step = replace(
        step_of([]),
        scores=scores,
        counts=np.array([4, 4], np.int32),
        adapter_slots=np.array([2, -1], np.int32),
    )
    ops, hidden = ReferenceOps(), torch.randn(8, VOCAB)
    targets = [torch.tensor(each.targets, dtype=torch.int32) for each in scores]
    sizes: list[int] = []
    slots: set[int] = set()

    def head(rows: torch.Tensor, adapters: Array) -> torch.Tensor:
        sizes.append(len(adapters))
        slots.update(adapters.tolist())
        return 2 * rows

    whole = [score.read() for score in score_prompts(ops, step, targets, hidden, head).scores]
    monkeypatch.setattr(scoring, "MAX_SCORED_ROWS", 2)
    parts = [score.read() for score in score_prompts(ops, step, targets, hidden, head).scores]
    assert sizes == [3, 4, 2, 1, 2, 2] and slots == {2, -1}
    assert parts == whole and [len(score) for score in whole] == [3, 4]
