"""LoRA of the embedding and of the output matrix through the whole worker, against peft."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest
import torch

from tests.oracle import Oracle, Verdict
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.process.config import WorkerConfig
from workers.wire.protocol import FinishReason, OutputKind, Pooling, SamplingParams

OUTER = {
    "head": {"rank": 4, "targets": ["lm_head"]},
    "head and layers": {"rank": 16, "targets": ["q_proj", "down_proj", "lm_head"]},
    "embedding": {"rank": 8, "targets": ["embed_tokens"]},
    "both": {"rank": 5, "targets": ["v_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    "plain": {"rank": 4},
}
LABELS = (3, 200, 17)
Asked = tuple[list[int], str | None]
"""Prompt, and the adapter's name."""
OracleOf = Callable[[str | None], Oracle]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Both have tied embeddings; Gemma scales them and caps its logits."""
    setup = Setup(tmp_path_factory.mktemp(request.param), request.param, OUTER)
    config = json.loads((setup.folder / "store/models" / setup.digest / "config.json").read_text())
    assert config["tie_word_embeddings"]
    return setup


@pytest.fixture(scope="module")
def oracle(served: Setup) -> Oracle:
    return Oracle(served.model, served.folders)


def draw_prompts(adapters: Iterable[str], seed: int) -> list[Asked]:
    """Two prompts for each adapter, and two for the base model."""
    rng = random.Random(seed)
    names = [*adapters, None] * 2
    rng.shuffle(names)
    return [([rng.randrange(256) for _ in range(rng.randrange(2, 40))], name) for name in names]


def assert_answers_are_pefts(
    setup: Setup, config: WorkerConfig, asked: list[Asked], num_tokens: int, oracle_of: OracleOf
) -> None:
    with Driver(config) as driver:
        driver.run(
            *(
                setup.generate(number, prompt, num_tokens, setup.refs[name] if name else None)
                for number, (prompt, name) in enumerate(asked)
            )
        )
    verdict = Verdict()
    for number, (prompt, name) in enumerate(asked):
        assert driver.ended[number] is FinishReason.LENGTH
        oracle_of(name).judge(verdict, prompt, driver.answers[number], name, f"{number} {name}")
    verdict.assert_equal()


def assert_scores_are_pefts(
    setup: Setup, backend: str, asked: list[Asked], oracle_of: OracleOf
) -> None:
    """Scores of prompts, and logits of labels."""
    scores = SamplingParams(0, 0, temperature=0.0, prompt_logprobs=0)
    kinds = [
        {"kind": OutputKind.SCORE, "params": scores},
        {"kind": OutputKind.EMBED, "pooling": Pooling.LAST, "labels": LABELS},
    ]
    with Driver(setup.config(ops=backend, max_batched_tokens=32)) as driver:
        for number, (prompt, name) in enumerate(asked):
            request = setup.generate(number, prompt, 0, setup.refs[name] if name else None)
            driver.submit(msgspec.structs.replace(request, **kinds[number % 2]))
        driver.wait()
    for number, (prompt, name) in enumerate(asked):
        logits, outputs = oracle_of(name).logits(prompt, name), driver.outputs[number]
        if number % 2:
            (vector,) = (output.vector for output in outputs if output.vector is not None)
            got = torch.from_numpy(np.frombuffer(vector, np.float32).copy())
            expected = logits[-1][list(LABELS)]
        else:
            found = [each for output in outputs for each in output.prompt_logprobs or []]
            got = torch.tensor([each.logprob for each in found])
            expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_batched_with_strangers_equals_peft(served: Setup, oracle: Oracle, backend: str) -> None:
    """Prompts in chunks beside answers: some of a step's sequences are sampled."""
    config = served.config(ops=backend, max_batched_tokens=24)
    assert_answers_are_pefts(served, config, draw_prompts(OUTER, 5), 24, lambda _: oracle)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scores_of_prompts_and_logits_of_labels_equal_peft(
    served: Setup, oracle: Oracle, backend: str
) -> None:
    assert_scores_are_pefts(served, backend, draw_prompts(OUTER, 6), lambda _: oracle)
