"""Names that cannot be taken for sure are refused for what they are."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig, PeftType

from adapters.errors import AdapterRejected
from adapters.format.configuration import HARMLESS, KNOWN, REFUSED, parse_config
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
    "image encoder of Qwen": (
        r"model\.layers\.(\d)",
        r"visual.blocks.\1",
        "adapter.unsupported.vision",
    ),
    "experts": (r"self_attn", "mlp.experts.3", "adapter.unsupported.experts"),
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
    "norm": (f"{PREFIX}model.layers.0.input_layernorm.weight", "adapter.unsupported.norm"),
    "norm of q": (f"{PREFIX}model.layers.0.self_attn.q_norm.weight", "adapter.unsupported.norm"),
    "final norm": (f"{PREFIX}model.norm.weight", "adapter.unsupported.norm"),
    "norm of GPT-2": (f"{PREFIX}transformer.h.0.ln_1.weight", "adapter.unsupported.norm"),
    "bias of a module": (f"{PREFIX}{Q0}.bias", "adapter.unsupported.bias"),
    "bias of a factor": (f"{PREFIX}{Q0}.lora_B.bias", "adapter.unsupported.lora_bias"),
    "bias of a named factor": (
        f"{PREFIX}{Q0}.lora_B.default.bias",
        "adapter.unsupported.lora_bias",
    ),
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


@pytest.mark.parametrize(
    "adapter",
    [
        *("lora_adapter", "lora_b", "bias_v2", "bias", "visual", "experts", "base_layer", "dora"),
        *("vision_tower", "modules_to_save", "lora_magnitude_vector", "norm", "mlx", "module"),
    ],
)
def test_an_adapter_may_have_any_name(adapter: str, tmp_path: Path) -> None:
    tensors = {name.replace(".weight", f".{adapter}.weight"): e for name, e in factors().items()}
    manifest = validate(write(tmp_path, CONFIG, encode(*entries(tensors))), BASE)
    assert manifest.projections == ("q_proj", "v_proj")


@pytest.mark.parametrize("shape", [(0,), (0, 64), (4, 0)])
def test_a_tensor_without_numbers_is_a_part_of_a_sharded_training(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    error = refuse(tmp_path, factors() | {A0: np.zeros(shape, np.float32)})
    assert (error.code, error.field, error.got) == ("adapter.tensor.empty", A0, str([*shape]))
    assert "gather before saving" in error.hint


def test_factors_that_the_configuration_does_not_name_have_the_way_out(tmp_path: Path) -> None:
    """Tinker trains the output matrix and writes `all-linear`."""
    head = {
        f"{PREFIX}lm_head.lora_A.weight": np.ones((4, 64), np.float32),
        f"{PREFIX}lm_head.lora_B.weight": np.ones((320, 4), np.float32),
    }
    config = CONFIG | {"target_modules": "all-linear"}
    with pytest.raises(AdapterRejected) as caught:
        validate(write(tmp_path, config, encode(*entries(factors() | head))), BASE)
    assert caught.value.code == "adapter.tensor.not_targeted"
    named = re.search(r'"target_modules": (\[.*?\])', caught.value.hint)
    assert named is not None
    config |= {"target_modules": json.loads(named[1])}
    manifest = validate(write(tmp_path, config, encode(*entries(factors() | head))), BASE)
    assert manifest.projections == ("q_proj", "v_proj", "lm_head")


@pytest.mark.parametrize("names", [["mlp.experts.down_proj"], ["gate.weight", "up_proj.weight"]])
def test_parameters_without_factors_are_named(names: list[str], tmp_path: Path) -> None:
    config = CONFIG | {"target_parameters": names}
    manifest = validate(write(tmp_path, config, encode(*entries(factors()))), BASE)
    (warning,) = manifest.warnings
    assert all(name in warning for name in names)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_the_length_of_a_header_may_look_like_a_pickle(length: int, tmp_path: Path) -> None:
    header, data = entries(factors(layers=(0,), projections=("q_proj",)))
    text = json.dumps(header).encode().ljust(length)
    content = len(text).to_bytes(8, "little") + text + data
    validate(write(tmp_path, CONFIG | {"target_modules": ["q_proj"]}, content), BASE)


def test_every_field_of_peft_is_used_refused_or_without_effect() -> None:
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= {
        *(*KNOWN, *REFUSED, *HARMLESS, "bias"),
    }
    for kind in PeftType:
        if kind is not PeftType.LORA:
            with pytest.raises(AdapterRejected, match="peft_type"):
                parse_config(json.dumps(CONFIG | {"peft_type": kind.value}).encode())


def test_a_doubled_prefix_is_shown_with_the_single_one(tmp_path: Path) -> None:
    tensors = {PREFIX + name: each for name, each in factors().items()}
    error = refuse(tmp_path, tensors)
    assert (error.got, error.allowed) == (PREFIX + A0, A0)
