"""What a plan says of a model is what its weights then take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.registry import select
from tests.doubles import FAMILIES, make_model
from tests.ops.conftest import triton_backend
from workers.models.loading import load_model
from workers.models.plan import ModelPlan


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_was_planned_for_them(tmp_path: Path, family: str) -> None:
    """Rows are few here, so their rounding weighs much: wide ones are within a few per cent."""
    sizes = {"hidden_size": 192, "intermediate_size": 720, "vocab_size": 1201}
    folder = make_model(tmp_path / "model", family, **sizes)
    for backend, dtype in (
        ("cpu", torch.bfloat16),
        ("cpu", torch.float32),
        ("reference", torch.bfloat16),
        ("triton", torch.bfloat16),
    ):
        plan = ModelPlan.read(folder, "tiny", dtype, max_model_len=64)
        ops = triton_backend() if backend == "triton" else select(backend)
        loaded = load_model(plan, ops)
        planned = plan.max_bytes(ops)
        assert loaded.num_bytes <= planned <= 1.25 * loaded.num_bytes


def test_a_head_that_is_tied_to_the_embedding_is_held_with_it_once(tmp_path: Path) -> None:
    """Where the backend multiplies with a table as it lies."""
    plan = ModelPlan.read(make_model(tmp_path, "llama"), "tiny", torch.float32, max_model_len=64)
    assert plan.spec.tie_word_embeddings
    table_bytes = plan.spec.vocab_size * plan.spec.hidden_size * torch.float32.itemsize
    once, twice = (load_model(plan, ops) for ops in (triton_backend(), select("reference")))
    assert twice.num_bytes - once.num_bytes == table_bytes
