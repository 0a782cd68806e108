"""The sampler alone: masks, bans, and log-probabilities of the samples that ask."""

from __future__ import annotations

import numpy as np
import torch

from ops.reference import ReferenceOps
from workers.execution.sampler import Sampler
from workers.execution.step_input import SampleInput, StepInput
from workers.execution.token_buffer import TokenBuffer
from workers.wire.protocol import SamplingParams

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
    ops, buffer = ReferenceOps(), TokenBuffer(4, 8, torch.device("cpu"))
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
    tokens, scores = sampler.draw(logits, inputs)
    assert tokens.tolist() == [39, 37, 38, 39]
    assert buffer.tokens[:, 4].tolist() == [39, 37, 38, 39]
    assert scores is not None
    masked, last = scores.read()
    assert (masked.token, last.token) == (37, 39), "the samples that ask, and no others"
    torch.testing.assert_close(masked.logprob, float(expected[37]))
    assert masked.top[0][0] == 39, "log-probabilities are of the logits before the mask"
