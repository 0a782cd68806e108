"""Reading config.json: both spellings mean the same, what is not computed is refused by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.doubles import SIZES
from workers.layers.rope_spec import RopeSpec
from workers.layers.rotary import inverse_frequencies, rope_table
from workers.models import read_any_spec, read_spec
from workers.models.spec import UnsupportedModel

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i / 4 for i in range(6)],
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **changes}


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("model_type", config_of("mixtral")),
        ("model_type", {}),
        ("hidden_act", config_of("llama", hidden_act="gelu")),
        ("hidden_activation", config_of("gemma2", hidden_activation="gelu")),
        ("hidden_act", config_of("gemma", hidden_act="relu")),
        ("no_rope_layers", config_of("smollm3", no_rope_layers=[1])),
        ("logits_scaling", config_of("granite", logits_scaling=0)),
        ("mlp_bias", config_of("llama", mlp_bias=True)),
        ("attention_bias", config_of("qwen3", attention_bias=True)),
        ("quantization_config", config_of("llama", quantization_config={"bits": 4})),
        ("num_local_experts", config_of("llama", num_local_experts=8)),
        ("auto_map", config_of("llama", auto_map={"AutoModel": "code.Model"})),
        ("partial_rotary_factor", config_of("llama", partial_rotary_factor=0.5)),
        ("rope_type", config_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0})),
        ("factor", config_of("qwen2", rope_parameters={"rope_type": "yarn"})),
        (
            "llama_4_scaling_beta",
            config_of("mistral", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}),
        ),
        ("long_factor", config_of("phi3", rope_parameters={**LONGROPE, "long_factor": None})),
        ("partial_rotary_factor", config_of("phi3", partial_rotary_factor=2.0)),
        ("partial_rotary_factor", config_of("glm4", partial_rotary_factor=0.45)),
        ("layer_types", config_of("gemma2", layer_types=["chunked_attention"] * 2)),
        ("layer_types", config_of("gemma2", layer_types=["full_attention"])),
        ("sliding_window", config_of("gemma2", sliding_window=None)),
        ("attn_logit_softcapping", config_of("gemma3_text", attn_logit_softcapping=50.0)),
        ("use_bidirectional_attention", config_of("gemma3_text", use_bidirectional_attention=True)),
        ("num_key_value_heads", config_of("llama", num_key_value_heads=3)),
        ("intermediate_size", config_of("llama", intermediate_size=None)),
    ],
)
def test_unsupported_is_refused_by_name(field: str, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_spec(config)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("named", "drawn"), [(None, ()), (-1, ()), (2, (2,)), ([2, 3, SIZES["vocab_size"]], (2, 3))]
)
def test_end_tokens_are_those_of_the_vocabulary(
    named: int | list[int] | None, drawn: tuple[int, ...]
) -> None:
    """Kernels write where an end token's logit is."""
    assert read_spec(config_of("llama", eos_token_id=named)).eos_token_ids == drawn


@pytest.mark.parametrize(
    ("model_type", "old", "new"),
    [
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        ),
        (
            "mistral",
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            "gemma3_text",
            {
                "num_hidden_layers": 12,
                "rope_theta": 2e6,
                "rope_local_base_freq": 3e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 6,
            },
            {
                "num_hidden_layers": 12,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                },
            },
        ),
    ],
)
def test_older_spelling_means_the_same(
    model_type: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert read_spec(config_of(model_type, **old)) == read_spec(config_of(model_type, **new))


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3"])
def test_frequencies_equal_transformers(rope_type: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    extra = {"default": {}, "linear": {"factor": 3.0}, "llama3": LLAMA3}[rope_type]
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, **extra}
    oracle = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=parameters))
    (layer, _) = read_spec(config_of("llama", rope_parameters=parameters)).layers
    torch.testing.assert_close(inverse_frequencies(layer.rope, 16), oracle.inv_freq)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta_fast": 4.0, "beta_slow": 2.0},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"attention_factor": 1.5},
    ],
)
def test_yarn_tables_equal_transformers(changes: dict[str, float]) -> None:
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    parameters = YARN | changes
    oracle = Qwen2RotaryEmbedding(Qwen2Config(**SIZES, rope_parameters=parameters))
    cos, sin = oracle(torch.zeros(1), torch.arange(80)[None])
    rope = read_spec(config_of("qwen2", rope_parameters=parameters)).served(512).layers[0].rope
    expected = torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=1)
    torch.testing.assert_close(rope_table(rope, 16, 80), expected)


@pytest.mark.parametrize("length", [60, 64, 65, 500])
def test_longrope_takes_the_factors_of_the_served_length(length: int) -> None:
    """transformers chooses by the text; here the keys of a text that grows are cached already."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    changes: dict[str, Any] = {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}
    config = Phi3Config(**SIZES, **deepcopy(changes))
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    spec = read_spec(config_of("phi3", **changes)).served(length)
    got = rope_table(spec.layers[0].rope, 16, length)
    torch.testing.assert_close(got[:, :6], cos[0, :, :6])
    torch.testing.assert_close(got[:, 8:14], sin[0, :, :6])
    assert (got[:, 6:8] == 1).all() and (got[:, 14:] == 0).all()


def test_qwen2_slides_from_max_window_layers_on() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert [layer.window for layer in read_spec(config_of("qwen2", **sliding)).layers] == [None, 8]
    sliding["use_sliding_window"] = False
    assert [layer.window for layer in read_spec(config_of("qwen2", **sliding)).layers] == [None] * 2


def test_generation_config_names_the_end_tokens() -> None:
    assert read_spec(config_of("llama")).eos_token_ids == (257,)
    assert read_any_spec(config_of("llama"), {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert read_spec(config_of("llama")).layers[0].rope == RopeSpec(10_000.0)


def test_theta_beside_rope_parameters_counts_as_in_transformers() -> None:
    from transformers import LlamaConfig

    parameters = {"rope_type": "default"}
    config = config_of("llama", rope_theta=500_000.0, rope_parameters=parameters)
    theirs = LlamaConfig.from_dict(deepcopy(config)).rope_parameters
    assert theirs is not None
    assert read_spec(config).layers[0].rope.theta == theirs.get("rope_theta") == 500_000.0


@pytest.mark.parametrize("missing", ["factor", "original_max_position_embeddings"])
def test_scaled_rope_without_its_numbers_is_refused_by_name(missing: str) -> None:
    scaling = {"rope_type": "llama3", **LLAMA3}
    del scaling[missing]
    with pytest.raises(UnsupportedModel, match=missing):
        read_spec(config_of("llama", rope_scaling=scaling))
