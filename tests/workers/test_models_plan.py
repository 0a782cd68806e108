"""What a plan says of a model is what its weights then take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.registry import select
from tests.doubles import FAMILIES, make_model
from workers.models.decoder import Decoder
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
    ):
        plan = ModelPlan.read(folder, "tiny", dtype, max_model_len=64)
        ops = select(backend)
        linear = torch.float32 if backend == "reference" else dtype
        loaded = Decoder.load(plan, ops)
        assert loaded.num_bytes <= plan.max_bytes(linear) <= 1.25 * loaded.num_bytes
