"""Weights of the embedding and of the output matrix that adapters replace, against peft."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from tests.oracle import Oracle, Verdict
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.wire.protocol import FinishReason, OutputKind, Pooling, SamplingParams

ADAPTERS = {
    "tokens": {"targets": ["v_proj"], "trainable_token_indices": [9, 200, 5, *range(30, 60)]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [7, 3, 19]}},
    "tokens of each": {
        "trainable_token_indices": {"embed_tokens": [*range(99)], "lm_head": [*range(50, 150)]}
    },
    "tokens, factors of the head": {
        "targets": ["q_proj", "lm_head"],
        "trainable_token_indices": [*range(100, 200)],
    },
    "head": {"targets": ["o_proj"], "modules_to_save": ["lm_head"]},
    "embedding, factors of the head": {
        "targets": ["v_proj", "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "both": {"modules_to_save": ["model.embed_tokens", "lm_head"]},
    "factors": {"targets": ["down_proj", "embed_tokens", "lm_head"]},
    "tied tokens": {"trainable_token_indices": [*range(20, 90)], "ensure_weight_tying": True},
    "tied embedding": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied factors": {"targets": ["v_proj", "embed_tokens"], "ensure_weight_tying": True},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
LABELS = (3, 200, 17)


@pytest.fixture(scope="module", params=["llama3", "gemma2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Gemma ties its embeddings, scales them, and caps its logits."""
    adapters = {name: {"rank": 4} | options for name, options in ADAPTERS.items()}
    return Setup(tmp_path_factory.mktemp(request.param), request.param, adapters)


@pytest.fixture(scope="module")
def oracles(served: Setup) -> dict[str | None, Oracle]:
    """peft cannot have all of these adapters on one model."""
    found = {name: Oracle(served.model, {name: served.folders[name]}) for name in ADAPTERS}
    return {None: Oracle(served.model, {})} | found


def draw_prompts(seed: int) -> list[tuple[list[int], str | None]]:
    rng = random.Random(seed)
    names = [*ADAPTERS, None] * 2
    rng.shuffle(names)
    return [([rng.randrange(256) for _ in range(rng.randrange(2, 40))], name) for name in names]


def test_batched_with_strangers_equals_peft(
    served: Setup, oracles: dict[str | None, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside answers: some of a step's sequences are sampled. Steps of other
    adapters alone run as graphs."""
    monkeypatch.setattr("adapters.pool.lora.CHUNK_BYTES", 50 * 4 * 64)
    asked = draw_prompts(5)
    config = served.config(ops="cpu", max_batched_tokens=24, uses_graphs=True, runs_ahead=True)
    with Driver(config) as driver:
        for number, (prompt, name) in enumerate(asked):
            driver.submit(served.generate(number, prompt, 12, served.refs[name] if name else None))
        driver.wait()
    verdict = Verdict()
    for number, (prompt, name) in enumerate(asked):
        assert driver.ended[number] is FinishReason.LENGTH
        oracles[name].judge(verdict, prompt, driver.answers[number], name, f"{number} {name}")
    verdict.assert_equal()


def test_scores_of_prompts_and_logits_of_labels_equal_peft(
    served: Setup, oracles: dict[str | None, Oracle]
) -> None:
    asked = draw_prompts(6)
    scores = SamplingParams(0, 0, temperature=0.0, prompt_logprobs=0)
    kinds = [
        {"kind": OutputKind.SCORE, "params": scores},
        {"kind": OutputKind.EMBED, "pooling": Pooling.LAST, "labels": LABELS},
    ]
    with Driver(served.config(ops="reference", max_batched_tokens=32)) as driver:
        for number, (prompt, name) in enumerate(asked):
            request = served.generate(number, prompt, 0, served.refs[name] if name else None)
            driver.submit(msgspec.structs.replace(request, **kinds[number % 2]))
        driver.wait()
    for number, (prompt, name) in enumerate(asked):
        logits, outputs = oracles[name].logits(prompt, name), driver.outputs[number]
        if number % 2:
            (vector,) = (output.vector for output in outputs if output.vector is not None)
            got = torch.from_numpy(np.frombuffer(vector, np.float32).copy())
            expected = logits[-1][list(LABELS)]
        else:
            found = [each for output in outputs for each in output.prompt_logprobs or []]
            got = torch.tensor([each.logprob for each in found])
            expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
