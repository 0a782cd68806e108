"""Weights of the embedding and of the output matrix that adapters replace, against peft."""

from __future__ import annotations

import pytest

from tests.oracle import Oracle
from tests.workers.execution.test_outer_modules import (
    assert_answers_are_pefts,
    assert_scores_are_pefts,
    draw_prompts,
)
from tests.workers.process.test_worker import Setup

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


def test_batched_with_strangers_equals_peft(
    served: Setup, oracles: dict[str | None, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside answers: some of a step's sequences are sampled. Steps of other
    adapters alone run as graphs."""
    monkeypatch.setattr("adapters.pool.lora.CHUNK_BYTES", 50 * 4 * 64)
    config = served.config(ops="cpu", max_batched_tokens=24, uses_graphs=True, runs_ahead=True)
    asked = draw_prompts(ADAPTERS, 5)
    assert_answers_are_pefts(served, config, asked, 12, oracles.__getitem__)


def test_scores_of_prompts_and_logits_of_labels_equal_peft(
    served: Setup, oracles: dict[str | None, Oracle]
) -> None:
    asked = draw_prompts(ADAPTERS, 6)
    assert_scores_are_pefts(served, "reference", asked, oracles.__getitem__)
