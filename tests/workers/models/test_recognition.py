"""Modules of transformers that compute what our ops compute, and modules that nearly do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.seed_oss import modeling_seed_oss as seed

from ops.base import Ops
from ops.registry import select
from tests.doubles import make_model
from tests.ops.conftest import triton_backend
from tests.workers.models.test_models import TOLERANCE, draw_tokens, oracle_logits
from tests.workers.models.test_transformers import import_tiny
from tests.workers.paged import PagedModel, Stream
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

ALL = "all 2 layers, as those of a native family"


def describe(plan: ModelPlan, ops: Ops, caplog: pytest.LogCaptureFixture) -> str:
    """Loads the model and checks a step of two texts. Returns what the log says of its modules."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        model = load_model(plan, ops)
    assert model.num_bytes <= plan.max_bytes(ops)
    (words,) = [
        record.getMessage().partition("our ops compute ")[2]
        for record in caplog.records
        if "our ops compute" in record.getMessage()
    ]
    return words


def check(source: Path, plan: ModelPlan, ops: Ops) -> None:
    """Compares the logits of two texts in one batch, in chunks, with transformers."""
    paged = PagedModel(load_model(plan, ops), ops)
    texts = [draw_tokens(1, 40), draw_tokens(2, 33)]
    streams = [Stream(), Stream()]
    got: list[list[Tensor]] = [[], []]
    for counts in ((25, 30), (14, 2), (1, 1)):
        work = [
            (stream, text[stream.length : stream.length + count])
            for stream, text, count in zip(streams, texts, counts, strict=True)
        ]
        for rows, logits in zip(got, paged.step(work), strict=True):
            rows.append(logits)
    for text, rows in zip(texts, got, strict=True):
        expected = oracle_logits(source, text, None)
        torch.testing.assert_close(torch.cat(rows), expected, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("seed_oss", ALL),
        ("exaone4", ALL),
        ("qwen3_moe", "9 norms, 2 attention modules, linears"),
        ("hunyuan_v1_dense", "9 norms, 2 gated MLPs, linears"),
        ("nemotron", "linears"),
    ],
)
def test_recognised_modules_equal_transformers_on_each_backend(
    family: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_model(tmp_path / "source", family)
    plan = import_tiny(source, tmp_path)
    for ops in (select("cpu"), select("reference"), triton_backend()):
        assert describe(plan, ops, caplog) == words
        check(source, plan, ops)


def centred(self: Any, hidden_states: Tensor) -> Tensor:
    centred = hidden_states - hidden_states.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return self.weight * centred * torch.rsqrt(variance + self.variance_epsilon)


def clamped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.9) * self.up_proj(x))


def capped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-50, 50))


def gated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an attention that halves its output where the first number of the input is
    positive."""

    def gated(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        y, weights = forward(self, hidden_states, *args, **kwargs)
        return y * torch.where(hidden_states[..., :1] > 0, 0.5, 1.0), weights

    return gated


def parallel(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize(
    ("module", "forward", "words"),
    [
        (seed.SeedOssRMSNorm, centred, "2 gated MLPs, 2 attention modules, linears"),
        (seed.SeedOssMLP, clamped, "5 norms, 2 attention modules, linears"),
        (seed.SeedOssMLP, capped, "5 norms, 2 attention modules, linears"),
        (
            seed.SeedOssAttention,
            gated(seed.SeedOssAttention.forward),
            "5 norms, 2 gated MLPs, linears",
        ),
        (
            seed.SeedOssDecoderLayer,
            parallel,
            "5 norms, 2 gated MLPs, 2 attention modules, linears",
        ),
    ],
)
def test_a_module_that_differs_is_left_to_transformers(
    module: Any,
    forward: Callable[..., Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "forward", forward)
    source = make_model(tmp_path / "source", "seed_oss")
    plan = import_tiny(source, tmp_path)
    assert describe(plan, select("cpu"), caplog) == words
    check(source, plan, select("cpu"))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("seed_oss", {"hidden_act": "gelu"}, "5 norms, 2 attention modules, linears"),
        ("olmo", {"clip_qkv": 8.0}, "2 gated MLPs, linears"),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 16,
                }
            },
            "5 norms, 2 gated MLPs, linears",
        ),
    ],
)
def test_other_activations_limits_and_scales_of_far_positions_are_noticed(
    family: str,
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = make_model(tmp_path / "source", family, **changes)
    plan = import_tiny(source, tmp_path)
    assert describe(plan, select("cpu"), caplog) == words
    check(source, plan, select("cpu"))
