"""Checkpoints that also read images: their language model alone is imported, and computes what the
whole does with a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.store.folder import LocalStore
from ops.registry import select
from tests.doubles import SIZES, TRANSFORMERS, make_adapter, make_tokenizer
from tests.workers.paged import PagedModel, Stream
from workers.importer import import_model
from workers.models.checkpoint import Checkpoint, CheckpointError, canonical_name
from workers.models.loading import load_model
from workers.models.plan import ModelPlan
from workers.models.spec import UnsupportedModel
from workers.models.text_part import OTHER_PARTS

VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
    },
    "mistral3": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 64,
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    },
}
TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "mistral3": {"sliding_window": None},
    "qwen2_5_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    },
    "qwen3_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 3, 3]}
    },
    "mistral3:ministral3": {},
    "gemma4:gemma4_text": TRANSFORMERS["gemma4_text"],
}
"""Families by the model type of the whole; of those with a colon, the text part has that of its
own, which has no native family."""
TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(60)]


@pytest.fixture(
    scope="module",
    params=["gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in [*TEXT][1:])],
)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with images, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, _, text_type = request.param.partition(":")
    text = SIZES | TEXT[request.param] | ({"model_type": text_type} if text_type else {})
    config = AutoConfig.for_model(
        kind,
        text_config={**text, "eos_token_id": 3},
        vision_config=VISION[kind],
        tie_word_embeddings=kind in ("gemma3", "gemma4"),
        eos_token_id=257,
    )
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(kind)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def load(source: Path, store: Path) -> PagedModel:
    (store / "models").mkdir(parents=True, exist_ok=True)
    digest = import_model(source, LocalStore(store))
    ops = select("cpu")
    plan = ModelPlan.read(store / "models" / digest, digest, torch.float32)
    assert plan.spec.eos_token_ids == (257,)
    return PagedModel(load_model(plan, ops), ops)


@torch.no_grad()
def test_text_alone_and_with_an_adapter_equals_the_whole(source: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    oracle = AutoModelForImageTextToText.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    base = oracle(torch.tensor([TOKENS])).logits[0]
    adapter = make_adapter(
        oracle,
        tmp_path / "adapter",
        targets=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    )
    adapted = PeftModel.from_pretrained(oracle, str(adapter)).eval()
    with_adapter = adapted(torch.tensor([TOKENS])).logits[0]
    assert (with_adapter - base).abs().max() > 0.1
    paged = load(source, tmp_path / "store")
    paged.load_adapter(0, adapter)
    got, plain = paged.step([(Stream(0), TOKENS), (Stream(), TOKENS)])
    torch.testing.assert_close(plain, base, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(got, with_adapter, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
def test_names_and_configs_of_every_release_mean_the_same(
    source: Path, tmp_path: Path, is_old: bool
) -> None:
    """transformers changed both in 4.52."""
    folder = tmp_path / "renamed"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    is_qwen = config["model_type"].startswith("qwen")
    if is_old and is_qwen:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config = text | config
    (folder / "config.json").write_text(json.dumps(config))
    text_root, head, other = "model.language_model.", "lm_head.", "model."
    if is_old:
        text_root, head, other = "language_model.model.", "language_model.lm_head.", ""
        if is_qwen:
            text_root, head = "model.", "lm_head."
    renamed = {}
    for stored, tensor in load_file(source / "model.safetensors").items():
        name = canonical_name(stored)
        if name.startswith("lm_head."):
            name = name.replace("lm_head.", head)
        elif name.startswith(OTHER_PARTS):
            name = name.replace("model.", other, 1)
        else:
            name = name.replace("model.", text_root, 1)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer(folder)
    both = [load(each, tmp_path / each.name) for each in (source, folder)]
    first, second = (paged.step([(Stream(), TOKENS)])[0] for paged in both)
    assert torch.equal(first, second)
    with Checkpoint(both[1].model.plan.folder) as checkpoint:
        assert not any(name.startswith(OTHER_PARTS) for name in checkpoint.names())


def test_a_quantised_whole_is_refused_by_name(tmp_path: Path) -> None:
    """Its text part does not say that it is quantised."""
    config = {"model_type": "mistral3", "quantization_config": {"quant_method": "fp8"}}
    config["text_config"] = {"model_type": "ministral3", "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="quantised checkpoints"):
        import_model(tmp_path, LocalStore(tmp_path / "store"))


def test_a_part_that_is_not_known_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.memory.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedModel), match=r"model\.memory\.weight"):
        load(folder, tmp_path / "store")
