"""Ids of the vocabulary for which the tokenizer has no token: they are drawn only if a request
names them, and what is drawn of the others does not change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ops.base import Ops
from ops.registry import select
from tests.doubles import SIZES, make_tokenizer
from tests.oracle import Oracle, Verdict
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.constraints.token_limits import TokenLimits
from workers.execution.sampler import Sampler
from workers.execution.step_input import SampleInput, SequenceResult, StepInput
from workers.models.unnamed_ids import read_unnamed_ids
from workers.scheduling.constraint import NO_TOKENS
from workers.wire.protocol import SamplingParams, TokenRules

VOCAB, UNNAMED = SIZES["vocab_size"], range(260, SIZES["vocab_size"])


def test_the_ids_are_those_without_a_token_and_no_end_token(tmp_path: Path) -> None:
    assert read_unnamed_ids(tmp_path, VOCAB, []) == []
    make_tokenizer(tmp_path)
    assert read_unnamed_ids(tmp_path, VOCAB, []) == [*UNNAMED]
    assert read_unnamed_ids(tmp_path, VOCAB, [257, 300]) == [t for t in UNNAMED if t != 300]
    assert read_unnamed_ids(tmp_path, 200, []) == []


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select(request.param)


def mask(params: SamplingParams) -> Any:
    if params.rules is None:
        return None
    return TokenLimits(params.rules, VOCAB, []).mask


def draw(ops: Ops, logits: torch.Tensor, all_params: list[SamplingParams], ids: list[int]) -> Any:
    count = len(all_params)
    step = StepInput(
        *(np.arange(count), np.full(count, -1, np.int32), np.zeros(count, np.int32)),
        *(np.ones(count, np.int32), np.zeros((count, 1), np.int64), 0),
        samples=[SampleInput(i, 1, 1, p, NO_TOKENS, mask(p)) for i, p in enumerate(all_params)],
        scores=[],
    )
    sampler = Sampler(ops, torch.zeros(count, 8, dtype=torch.int32), ids)
    results = [SequenceResult() for _ in all_params]
    sampler.draw(logits.clone(), sampler.upload(step)).read_into(results)
    return results


@pytest.mark.parametrize("ids", [[*UNNAMED], [3, 100, 259, 319]], ids=["padding", "gaps"])
def test_they_are_never_drawn_and_seeded_draws_are_those_of_the_rest(
    ops: Ops, ids: list[int]
) -> None:
    rng = random.Random(7)
    torch.manual_seed(7)
    logits = torch.randn(64, VOCAB)
    logits[:, ids] += 5.0
    params = [
        SamplingParams(
            8, rng.randrange(1 << 40), temperature=rng.choice([0.0, 0.7, 2.0]), top_p=0.9
        )
        for number in range(64)
    ]
    without = logits.clone()
    without[:, ids] = -torch.inf
    tokens = [result.tokens for result in draw(ops, logits, params, ids)]
    assert tokens == [result.tokens for result in draw(ops, without, params, [])]
    assert not {token for (token,) in tokens} & {*ids}


def test_a_request_draws_those_that_it_names_and_a_neighbour_none(ops: Ops) -> None:
    torch.manual_seed(7)
    logits = torch.randn(5, VOCAB)
    logits[:, [300, 301]] = torch.tensor([50.0, 60.0])
    usual = SamplingParams(8, 0, temperature=0.0, logprobs=1)
    params = [
        usual,
        msgspec.structs.replace(usual, logit_bias={300: -1.0}),
        msgspec.structs.replace(usual, stop_token_ids=(300, 5)),
        msgspec.structs.replace(usual, rules=TokenRules(allowed=(300, 5))),
        usual,
    ]
    results = draw(ops, logits, params, [*UNNAMED])
    tokens = [result.tokens[0] for result in results]
    assert tokens[1:4] == [300] * 3 and tokens[0] not in UNNAMED and tokens[4] not in UNNAMED
    tops = [result.logprobs[0].top[0][0] for result in results]
    assert tops == [301] * 5, "log-probabilities are over all ids, as transformers gives them"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_worker_generates_what_the_oracle_does_without_them(tmp_path: Path, backend: str) -> None:
    llama = Setup(tmp_path, "llama", {"r4": {"rank": 4}})
    oracle, verdict, rng = Oracle(llama.model, llama.folders), Verdict(), random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(6)] for _ in range(12)]
    with Driver(llama.config(ops=backend, runs_ahead=True)) as driver:
        for number, prompt in enumerate(prompts):
            ref = llama.refs["r4"] if number % 2 else None
            driver.submit(llama.generate(number, prompt, 12, ref))
        driver.wait()
    assert not {*UNNAMED} & {token for answer in driver.answers.values() for token in answer}
    for number, prompt in enumerate(prompts):
        adapter = "r4" if number % 2 else None
        oracle.judge(verdict, prompt, driver.answers[number], adapter, str(number))
    verdict.assert_equal()
