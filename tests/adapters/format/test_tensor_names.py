"""Names that cannot be taken for sure are refused for what they are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from adapters.errors import AdapterRejected
from tests.adapters.files import (
    BASE,
    CONFIG,
    encode,
    entries,
    factors,
    tensor_name,
    validate,
    write,
)

Q0 = BASE.module_path(0, "q_proj")
A0 = tensor_name(Q0, "A")
PREFIX = "base_model.model."

TWO_NAMINGS: dict[str, str] = {
    "compiled and not": f"_orig_mod.{A0}",
    "parallel and not": f"module.{A0}",
    "compiled inside": A0.replace("q_proj", "_orig_mod.q_proj"),
    "text and images": A0.replace("model.layers", "model.language_model.layers"),
    "text and images, older": A0.replace("model.layers", "language_model.model.layers"),
    "without output matrix": A0.replace("model.model.", "model."),
}

RENAMED: dict[str, tuple[str, str, str]] = {
    "doubled prefix of peft": (r"^", PREFIX, "adapter.tensor.doubled_prefix"),
    "doubled prefix around a wrapper": (
        r"^",
        f"{PREFIX}_orig_mod.",
        "adapter.tensor.doubled_prefix",
    ),
    "doubled model": (r"model\.layers", "model.model.layers", "adapter.tensor.doubled_prefix"),
    "no prefix": (r"^base_model\.model\.", "", "adapter.tensor.unbound"),
    "unknown root": (r"model\.layers", "transformer.h", "adapter.tensor.unbound"),
    "adapter's name with a dot": (r"(lora_[AB])", r"\1.a.b", "adapter.tensor.unbound"),
    "kohya, image model": (
        r"^.*(\d)\.(self_attn|mlp)\.(\w_proj)\.lora_(A|B).weight",
        r"lora_unet_\1_\3.\4.lora_down.weight",
        "adapter.unsupported.kohya",
    ),
    "kohya, text encoder": (
        r"^.*(\d)\.self_attn\.(\w_proj)\.lora_(A|B).weight",
        r"lora_te1_text_model_encoder_layers_\1_self_attn_\2.\3",
        "adapter.unsupported.kohya",
    ),
    "kohya's factors": (r"lora_A", "lora_down", "adapter.unsupported.kohya"),
    "MLX": (r"^base_model\.model\.(.*)lora_A\.weight", r"\1lora_a", "adapter.unsupported.mlx"),
    "adapter on an adapter": (
        r"\.lora_",
        ".base_layer.lora_",
        "adapter.unsupported.nested_adapter",
    ),
    "weights of a model": (
        r"^base_model\.model\.(.*)\.lora_(A|B)\.weight",
        r"\1.\2_proj.weight",
        "adapter.unsupported.full_checkpoint",
    ),
    "image encoder": (
        r"model\.layers\.(\d)",
        r"model.vision_tower.vision_model.encoder.layers.\1",
        "adapter.unsupported.vision",
    ),
}

ADDED: dict[str, tuple[str, str]] = {
    "base weights": (f"{PREFIX}{Q0}.base_layer.weight", "adapter.unsupported.base_weights"),
    "base weights, quantised": (
        f"{PREFIX}{Q0}.base_layer.weight.absmax",
        "adapter.unsupported.base_weights",
    ),
    "bias of the base": (f"{PREFIX}{Q0}.base_layer.bias", "adapter.unsupported.base_weights"),
    "prompt tuning": ("prompt_embeddings", "adapter.unsupported.prompt_tuning"),
    "second adapter": (
        f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.other.weight",
        "adapter.tensor.several_adapters",
    ),
    "kohya's alpha": ("lora_te_text_model_0.alpha", "adapter.unsupported.kohya"),
}


def refuse(folder: Path, tensors: dict[str, np.ndarray]) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        validate(write(folder, CONFIG, encode(*entries(tensors))), BASE)
    assert len(caught.value.hint) > 20
    return caught.value


@pytest.mark.parametrize("kind", TWO_NAMINGS)
def test_two_namings_of_one_module_are_both_shown(kind: str, tmp_path: Path) -> None:
    tensors = factors()
    error = refuse(tmp_path, tensors | {TWO_NAMINGS[kind]: tensors[A0]})
    assert error.code == "adapter.tensor.two_namings"
    assert (error.field, error.got) == (TWO_NAMINGS[kind], A0)


@pytest.mark.parametrize("kind", RENAMED)
def test_other_names_are_refused_for_what_they_are(kind: str, tmp_path: Path) -> None:
    old, new, code = RENAMED[kind]
    tensors = {re.sub(old, new, name, count=1): each for name, each in factors().items()}
    assert len(tensors) == 8
    assert refuse(tmp_path, tensors).code == code


@pytest.mark.parametrize("kind", ADDED)
def test_other_tensors_are_refused_for_what_they_are(kind: str, tmp_path: Path) -> None:
    name, code = ADDED[kind]
    tensors = {key: each for key, each in factors().items() if key != name.replace(".other", "")}
    assert refuse(tmp_path, tensors | {name: np.zeros((4, 64), np.float32)}).code == code


def test_a_doubled_prefix_is_shown_with_the_single_one(tmp_path: Path) -> None:
    tensors = {PREFIX + name: each for name, each in factors().items()}
    error = refuse(tmp_path, tensors)
    assert (error.got, error.allowed) == (PREFIX + A0, A0)
