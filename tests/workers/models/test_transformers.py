"""Families without native code, computed by transformers' own, against transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.errors import AdapterRejected
from adapters.format.validator import AdapterFiles
from adapters.store.folder import LocalStore
from ops.registry import select
from tests.adapters.files import validate
from tests.doubles import TRANSFORMERS, make_adapter, make_model
from tests.workers.models.test_models import TOLERANCE, draw_tokens, oracle_logits
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from workers.importer import huggingface, import_model
from workers.importer.huggingface import ImportRefused
from workers.models import transformers_modules
from workers.models.loading import load_model
from workers.models.plan import ModelPlan
from workers.models.spec import UnsupportedModel

QUICK = ("cohere2",)
ON_REFERENCE = (*QUICK, "gemma4_text", "gpt_oss")
"""Families that the reference computes, too: heads of two sizes, windows and sinks."""


def import_tiny(source: Path, tmp_path: Path) -> ModelPlan:
    store = LocalStore(tmp_path / "store")
    digest = import_model(source, store)
    return ModelPlan.read(store.model_folder(digest), digest, torch.float32)


def linear_names(plan: ModelPlan) -> str:
    """Returns a pattern of the paths of all linears that take LoRA. Of a name such as `down_proj`
    peft would adapt the fused experts too, and of Ernie's MLPs it does so in any case."""
    linears = [*plan.shape.linears]
    if plan.shape.tie_word_embeddings or plan.spec.model_type == "phi":
        # Of a tied output matrix peft would adapt the embedding too, and with one that has a bias
        # it saves that bias, which is refused.
        linears = [linear for linear in linears if linear.path != "lm_head"]
    if plan.spec.model_type == "ernie4_5_moe":
        linears = [linear for linear in linears if "self_attn" in linear.path]
    return "|".join(linear.path.replace(".", r"\.") for linear in linears)


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.full)
        for family in TRANSFORMERS
    ],
)
def test_equal_to_transformers_and_peft(family: str, tmp_path: Path) -> None:
    """Base and LoRA on every linear in one batch: prefill in chunks, then decode, beyond the window
    of 24."""
    source = make_model(tmp_path / "source", family)
    plan = import_tiny(source, tmp_path)
    adapter = make_adapter(source, tmp_path / "adapter", targets=linear_names(plan))
    manifest = validate(AdapterFiles.in_folder(adapter), plan.shape)
    assert set(manifest.projections) <= set(plan.shape.projections)
    assert len(manifest.projections) >= 4
    texts = [draw_tokens(1, 45), draw_tokens(2, 39), draw_tokens(3, 41)]
    expected = [
        oracle_logits(source, text, path)
        for text, path in zip(texts, (adapter, adapter, None), strict=True)
    ]
    for backend in ("cpu", "reference") if family in ON_REFERENCE else ("cpu",):
        ops = select(backend)
        paged = PagedModel(load_model(plan, ops), ops)
        paged.load_adapter(0, adapter)
        streams = [Stream(0), Stream(0), Stream()]
        got: list[list[Tensor]] = [[], [], []]
        for counts in ((30, 5, 33), (7, 26, 1), *[(1, 1, 1)] * 7):
            work = [
                (stream, text[stream.length : stream.length + count])
                for stream, text, count in zip(streams, texts, counts, strict=True)
            ]
            for rows, logits in zip(got, paged.step(work), strict=True):
                rows.append(logits)
        for stream, rows, logits in zip(streams, got, expected, strict=True):
            computed = torch.cat(rows)
            torch.testing.assert_close(computed, logits[: stream.length], atol=TOLERANCE, rtol=1e-4)


@pytest.mark.full
def test_rounding_of_half_precision_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model in bfloat16, as if it had no native code: 30 layers whose attention is ours in
    float32 and transformers' own in bfloat16."""
    store = LocalStore(tmp_path / "store")
    native = import_model(demo_gguf(), store)
    monkeypatch.setattr(huggingface, "FAMILIES", {})
    plan = import_tiny(store.model_folder(native), tmp_path)
    assert plan.shape.served_by == "transformers"
    assert len(plan.shape.linears) == 30 * 7 + 1


def recurrent() -> dict[str, Any]:
    return {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("qwen3_5_text", recurrent(), "recurrent state"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "ignores transformers' interface"),
        ("llama4_text", {"attention_chunk_size": 8}, "neither causal nor a sliding window"),
        ("cohere2", {"auto_map": {"AutoModel": "code.Model"}}, "remote code is never run"),
        (
            "arcee",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type = 'dynamic'",
        ),
        ("nobody_knows", {}, "those of transformers"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    is_written_after = family == "nobody_knows" or "auto_map" in changes
    if is_written_after:
        source = make_model(tmp_path / "source", "arcee")
    else:
        source = make_model(tmp_path / "source", family, **changes)
    if is_written_after:
        config = json.loads((source / "config.json").read_text())
        config |= {"model_type": family} | changes
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises((UnsupportedModel, ImportRefused), match=why):
        import_model(source, LocalStore(tmp_path / "store"))
    assert not list((tmp_path / "store").glob("models/*"))


def test_without_transformers_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model(tmp_path / "source", "arcee")

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(transformers_modules, "import_module", missing)
    with pytest.raises(UnsupportedModel, match=r"-m pip install 'transformers"):
        import_model(source, LocalStore(tmp_path / "store"))


def test_lora_on_fused_experts_is_refused_by_name(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "mixtral")
    plan = import_tiny(source, tmp_path)
    adapter = make_adapter(
        source, tmp_path / "adapter", targets=["q_proj"], target_parameters=["experts.down_proj"]
    )
    with pytest.raises(AdapterRejected) as refused:
        validate(AdapterFiles.in_folder(adapter), plan.shape)
    assert refused.value.code == "adapter.unsupported.experts"


def test_heads_of_several_sizes_share_a_page(tmp_path: Path) -> None:
    """Pages hold each module's keys and values once, without overlap."""
    plan = import_tiny(make_model(tmp_path / "source", "gemma4_text"), tmp_path)
    ends = 0
    for layout, layer in plan.site_layouts:
        assert layer * layout.layer_bytes >= ends
        ends = (layer + 1) * layout.layer_bytes
    assert len({layout.head_dim for layout, _ in plan.site_layouts}) == 2
    assert ends <= plan.kv_layout.page_bytes
