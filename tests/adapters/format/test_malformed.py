"""Every kind of bad adapter is refused by its name, from bounded reads."""

from __future__ import annotations

import json
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.errors import AdapterRejected
from adapters.format.validator import AdapterFiles, Limits
from adapters.manifest import ModelLinear
from adapters.pool.lora import ImageLayout, pack
from ops.factor_layout import ROWS
from tests.adapters.files import (
    BASE,
    CONFIG,
    encode,
    entries,
    factors,
    listed,
    tensor_name,
    validate,
    write,
)

Q0 = BASE.module_path(0, "q_proj")
A0, B0 = tensor_name(Q0, "A"), tensor_name(Q0, "B")
HEAD = {
    tensor_name("lm_head", "A"): np.zeros((4, 64), np.float32),
    tensor_name("lm_head", "B"): np.zeros((320, 4), np.float32),
}
GOOD_HEADER, GOOD_DATA = entries(factors())
GOOD = encode(GOOD_HEADER, GOOD_DATA)


def header_with(name: str, **changes: Any) -> bytes:
    return encode({**GOOD_HEADER, name: GOOD_HEADER[name] | changes}, GOOD_DATA)


def tensors_with(name: str, array: np.ndarray | None) -> bytes:
    """The good tensors with one changed, added or (None) left out."""
    tensors = factors()
    tensors.pop(name, None)
    if array is not None:
        tensors[name] = array
    return encode(*entries(tensors))


def poisoned(value: float) -> bytes:
    tensors = factors()
    tensors[B0][3, 1] = value
    return encode(*entries(tensors))


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def deep_json() -> bytes:
    return b'{"a":' * 100_000 + b"1" + b"}" * 100_000


def many_names() -> bytes:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return encode({f"n{i}": empty for i in range(9000)}, b"")


def doubled_key() -> bytes:
    raw = json.dumps(GOOD_HEADER).encode()
    entry = json.dumps({A0: GOOD_HEADER[A0]}).encode()[1:-1]
    return encode(b"{" + entry + b"," + raw[1:], GOOD_DATA)


def bf16_infinity() -> bytes:
    tensors = factors()
    tensors[A0] = np.full((4, 64), 0x7F80, np.uint16)
    return encode(*entries(tensors))


A_END = GOOD_HEADER[A0]["data_offsets"][1]
OVERFLOW = {"shape": [1 << 31, 1 << 31, 16], "data_offsets": [0, A_END]}

WEIGHTS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "adapter.file.truncated"),
    "seven bytes": (b"\0" * 7, "adapter.file.truncated"),
    "header bomb": (struct.pack("<Q", 1 << 40) + b"{}", "adapter.header.too_large"),
    "largest header length": (b"\xff" * 8, "adapter.header.too_large"),
    "header past the end": (struct.pack("<Q", 1000) + b"{}", "adapter.file.truncated"),
    "not JSON": (encode(b"\xfe\xfe\xfe", b""), "adapter.header.invalid"),
    "JSON array": (encode(b"[]", b""), "adapter.header.invalid"),
    "deep JSON": (encode(deep_json(), b""), "adapter.header.invalid"),
    "duplicate key": (doubled_key(), "adapter.header.invalid"),
    "NaN in JSON": (encode(b'{"a": NaN}', b""), "adapter.header.invalid"),
    "huge number": (encode(b'{"a": ' + b"9" * 5000 + b"}", b""), "adapter.header.invalid"),
    "entry not an object": (encode({"a": 1}, b""), "adapter.header.invalid"),
    "extra entry field": (header_with(A0, evil=1), "adapter.header.invalid"),
    "metadata of numbers": (
        encode({**GOOD_HEADER, "__metadata__": {"a": 1}}, GOOD_DATA),
        "adapter.header.invalid",
    ),
    "too many tensors": (many_names(), "adapter.header.too_many_tensors"),
    "no tensors": (encode({}, b""), "adapter.tensor.none"),
    "4 KB name": (tensors_with("n" * 4096, zeros(1)), "adapter.tensor.name"),
    "path-like name": (tensors_with("../../etc/passwd", zeros(1)), "adapter.tensor.unbound"),
    "NUL in name": (tensors_with("a\0b", zeros(1)), "adapter.tensor.unbound"),
    "overlap": (
        header_with(B0, data_offsets=[A_END - 4, A_END - 4 + 1024]),
        "adapter.header.overlap",
    ),
    "gap": (header_with(A0, data_offsets=[4, A_END + 4]), "adapter.header.gap"),
    "negative offset": (header_with(A0, data_offsets=[-4, A_END - 4]), "adapter.header.offsets"),
    "shape and bytes differ": (header_with(A0, shape=[4, 65]), "adapter.header.offsets"),
    "shape overflow": (header_with(A0, **OVERFLOW), "adapter.header.offsets"),
    "negative size": (header_with(A0, shape=[-4, -64]), "adapter.tensor.shape"),
    "size over 32 bits": (header_with(A0, shape=[1 << 62, 4]), "adapter.tensor.shape"),
    "short data": (GOOD[:-1], "adapter.file.truncated"),
    "tail": (GOOD + b"\0", "adapter.file.trailing_bytes"),
    "float64": (tensors_with(A0, np.zeros((4, 64))), "adapter.tensor.dtype"),
    "int8": (tensors_with(A0, np.zeros((4, 64), np.int8)), "adapter.tensor.dtype"),
    "NaN": (poisoned(np.nan), "adapter.tensor.not_finite"),
    "infinity": (poisoned(-np.inf), "adapter.tensor.not_finite"),
    "beyond float16": (poisoned(1e30), "adapter.tensor.not_finite"),
    "bfloat16 infinity": (bf16_infinity(), "adapter.tensor.not_finite"),
    "missing B": (tensors_with(B0, None), "adapter.tensor.missing"),
    "missing A": (tensors_with(A0, None), "adapter.tensor.missing"),
    "rank of A": (tensors_with(A0, zeros(5, 64)), "adapter.rank.mismatch"),
    "rank of B": (tensors_with(B0, zeros(64, 5)), "adapter.rank.mismatch"),
    "another base": (tensors_with(A0, zeros(4, 128)), "adapter.base.mismatch"),
    "vector": (tensors_with(A0, zeros(4)), "adapter.tensor.shape"),
    "layer past the end": (
        tensors_with(tensor_name("model.layers.2.self_attn.q_proj", "A"), zeros(4, 64)),
        "adapter.tensor.unbound",
    ),
    "not targeted": (
        encode(*entries(factors(projections=("q_proj", "v_proj", "o_proj")))),
        "adapter.tensor.not_targeted",
    ),
    "lm_head that is not targeted": (
        encode(*entries(factors() | HEAD)),
        "adapter.tensor.not_targeted",
    ),
    "half of an embedding LoRA": (
        tensors_with("base_model.model.model.embed_tokens.lora_embedding_A", zeros(4, 320)),
        "adapter.tensor.missing",
    ),
    "factors of a linear for the embedding": (
        tensors_with(tensor_name("model.embed_tokens", "A"), zeros(4, 320)),
        "adapter.tensor.unbound",
    ),
    "weight of the base model without factors": (
        tensors_with("base_model.model.lm_head.base_layer.weight", zeros(320, 64)),
        "adapter.unsupported.base_weights",
    ),
    "resized vocabulary": (
        tensors_with("base_model.model.model.embed_tokens.weight", zeros(330, 64)),
        "adapter.unsupported.full_embedding",
    ),
    "DoRA tensors": (
        tensors_with(f"base_model.model.{Q0}.lora_magnitude_vector", zeros(64)),
        "adapter.unsupported.dora",
    ),
    "bias of B": (
        tensors_with(f"base_model.model.{Q0}.lora_B.bias", zeros(64)),
        "adapter.unsupported.lora_bias",
    ),
    "pickle renamed": (pickle.dumps({"a": 1}, protocol=4), "adapter.unsupported.pickle"),
    "torch zip renamed": (b"PK\x03\x04" + b"\0" * 60, "adapter.unsupported.pickle"),
}

STRICT = Limits(matching_cpu_s=0.2)

CONFIGS: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "adapter.config.invalid"),
    "not UTF-8": (b"\xff\xfe", "adapter.config.invalid"),
    "deep": (deep_json(), "adapter.config.invalid"),
    "duplicate key": (b'{"r": 1, "r": 2}', "adapter.config.invalid"),
    "too large": (b" " * (1 << 20) + b"{}", "adapter.file.too_large"),
    "r is text": ({"r": "4"}, "adapter.config.invalid"),
    "r is true": ({"r": True}, "adapter.config.invalid"),
    "r is zero": ({"r": 0}, "adapter.config.rank"),
    "alpha overflows": ({"lora_alpha": 10**400}, "adapter.config.invalid"),
    "alpha is huge": ({"lora_alpha": 1e30}, "adapter.config.alpha"),
    "no targets": ({"target_modules": None}, "adapter.config.invalid"),
    "wrong target": ({"target_modules": ["gate_proj"]}, "adapter.tensor.not_targeted"),
    "excluded": ({"exclude_modules": ["q_proj"]}, "adapter.tensor.not_targeted"),
    "other layers": ({"layers_to_transform": [1]}, "adapter.tensor.not_targeted"),
    "rank pattern": ({"rank_pattern": {"q_proj": 3}}, "adapter.rank.mismatch"),
    "exploding regex": ({"target_modules": r"((\w+\.?)+)+!"}, "adapter.config.pattern_too_complex"),
    "invalid regex": ({"target_modules": "("}, "adapter.config.pattern"),
    "pattern of other modules": ({"target_modules": r"(.)\1.*"}, "adapter.tensor.not_targeted"),
    "recursive regex": (
        {"target_modules": "(" * 900 + ")" * 900},
        "adapter.config.pattern_too_complex",
    ),
    "long regex": ({"target_modules": "a" * 5000}, "adapter.config.pattern_too_complex"),
    "regex and layers": (
        {"target_modules": ".*", "layers_to_transform": 1},
        "adapter.config.invalid",
    ),
    "unknown key": ({"use_quantum": True}, "adapter.config.unknown_key"),
    "unknown init": ({"init_lora_weights": "dream"}, "adapter.unsupported.init_lora_weights"),
    "missing tensors of a random init": (
        {"target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": False},
        "adapter.tensor.missing",
    ),
    "IA3": ({"peft_type": "IA3"}, "adapter.unsupported.peft_type"),
    "classifier": ({"task_type": "SEQ_CLS"}, "adapter.unsupported.task_type"),
    "custom code": (
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
        "adapter.unsupported.auto_mapping",
    ),
    "custom class": (
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "evil"}},
        "adapter.unsupported.auto_mapping",
    ),
    "bias": ({"bias": "all"}, "adapter.unsupported.bias"),
    "DoRA": ({"use_dora": True}, "adapter.unsupported.dora"),
    "a norm saved": (
        {"modules_to_save": ["lm_head", "norm"]},
        "adapter.unsupported.modules_to_save",
    ),
    "a classifier saved": ({"modules_to_save": ["score"]}, "adapter.unsupported.modules_to_save"),
    "saved by number": ({"modules_to_save": [1]}, "adapter.config.invalid"),
    "a saved weight that is not there": (
        {"modules_to_save": ["lm_head"]},
        "adapter.tensor.missing",
    ),
    "lora_bias": ({"lora_bias": True}, "adapter.unsupported.lora_bias"),
    "aLoRA invoked by nothing": (
        {"alora_invocation_tokens": []},
        "adapter.config.invocation_tokens",
    ),
    "aLoRA with a long invocation": (
        {"alora_invocation_tokens": [1] * 1025},
        "adapter.config.invocation_tokens",
    ),
    "aLoRA outside the vocabulary": (
        {"alora_invocation_tokens": [1, 320]},
        "adapter.config.invocation_tokens",
    ),
    "aLoRA with a negative token": (
        {"alora_invocation_tokens": [-1]},
        "adapter.config.invocation_tokens",
    ),
    "aLoRA invoked by text": ({"alora_invocation_tokens": "<fix>"}, "adapter.config.invalid"),
    "aLoRA invoked by booleans": ({"alora_invocation_tokens": [True]}, "adapter.config.invalid"),
    "aLoRA invoked by fractions": ({"alora_invocation_tokens": [1.5]}, "adapter.config.invalid"),
    "aLoRA without task": (
        {"alora_invocation_tokens": [1], "task_type": None},
        "adapter.unsupported.task_type",
    ),
    "rows that are not there": ({"trainable_token_indices": [1]}, "adapter.tensor.missing"),
    "tokens of another module": (
        {"trainable_token_indices": {"norm": [1]}},
        "adapter.unsupported.trainable_tokens",
    ),
    "tokens of one module twice": (
        {"trainable_token_indices": {"embed_tokens": [1], "model.embed_tokens": [2]}},
        "adapter.unsupported.trainable_tokens",
    ),
    "a token twice": ({"trainable_token_indices": [3, 1, 3]}, "adapter.config.token_indices"),
    "tokens as text": ({"trainable_token_indices": ["<x>"]}, "adapter.config.invalid"),
    "parameters of adapted modules": (
        {"target_parameters": ["self_attn.q_proj.weight"]},
        "adapter.unsupported.target_parameters",
    ),
    "parameters that do not begin at zero": (
        {"target_parameters": ["experts.down_proj"], "init_lora_weights": "orthogonal"},
        "adapter.tensor.missing",
    ),
    "replication": ({"layer_replication": [[0, 2]]}, "adapter.unsupported.layer_replication"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "adapter.unsupported.fan_in_fan_out"),
    "megatron": ({"megatron_config": {"a": 1}}, "adapter.unsupported.megatron"),
    "loftq": ({"loftq_config": {"loftq_bits": 4}}, "adapter.unsupported.loftq"),
    "qalora": ({"use_qalora": True}, "adapter.unsupported.qalora"),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "adapter.unsupported.bdlora"),
    "arrow": ({"arrow_config": {"top_k": 3}}, "adapter.unsupported.arrow"),
    "kasa": ({"kasa_config": {"beta": 1}}, "adapter.unsupported.kasa"),
    "velora": ({"velora_config": {"scale": 1}}, "adapter.unsupported.velora"),
    "monteclora": ({"monteclora_config": {"a": 1}}, "adapter.unsupported.monteclora"),
    **{
        init: ({"init_lora_weights": init}, f"adapter.unsupported.{init.split('_niter')[0]}")
        for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")
    },
}


PREFIX = "base_model.model."
TABLES = {f"{PREFIX}{path}.weight": zeros(320, 64) for path in ("lm_head", "model.embed_tokens")}
TOKENS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD_TOKENS = f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"
BOTH: dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"]}

REPLACED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "more rows than the vocabulary": (
        BOTH,
        TABLES | {f"{PREFIX}lm_head.weight": zeros(322, 64)},
        "adapter.unsupported.resized_vocabulary",
    ),
    "fewer rows": (
        BOTH,
        TABLES | {f"{PREFIX}model.embed_tokens.weight": zeros(300, 64)},
        "adapter.unsupported.resized_vocabulary",
    ),
    "rows of another width": (
        BOTH,
        TABLES | {f"{PREFIX}lm_head.weight": zeros(320, 32)},
        "adapter.base.mismatch",
    ),
    "a weight that is not named": (
        {"modules_to_save": ["lm_head"]},
        TABLES,
        "adapter.unsupported.full_embedding",
    ),
    "a weight of another module": (
        BOTH,
        TABLES | {f"{PREFIX}score.weight": zeros(2, 64)},
        "adapter.tensor.unbound",
    ),
    "a weight of another path": (
        BOTH,
        TABLES | {f"{PREFIX}vision.lm_head.weight": zeros(320, 64)},
        "adapter.tensor.unbound",
    ),
    "a weight under two names": (
        BOTH,
        TABLES | {f"{PREFIX}lm_head.modules_to_save.weight": zeros(320, 64)},
        "adapter.tensor.two_namings",
    ),
    "a weight and its factors": (
        BOTH | {"target_modules": ["q_proj", "v_proj", "lm_head"]},
        TABLES | HEAD,
        "adapter.unsupported.changed_twice",
    ),
    "a weight and rows of it": (
        BOTH | {"trainable_token_indices": [1]},
        TABLES | {TOKENS: zeros(1, 64)},
        "adapter.unsupported.changed_twice",
    ),
    "a weight of an output matrix that is tied to rows": (
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [1]},
        {f"{PREFIX}lm_head.weight": zeros(320, 64), TOKENS: zeros(1, 64)},
        "adapter.unsupported.changed_twice",
    ),
    "a token outside the vocabulary": (
        {"trainable_token_indices": [5, 320]},
        {TOKENS: zeros(2, 64)},
        "adapter.config.token_indices",
    ),
    "a negative token": (
        {"trainable_token_indices": [-1]},
        {TOKENS: zeros(1, 64)},
        "adapter.config.token_indices",
    ),
    "fewer rows than tokens": (
        {"trainable_token_indices": [5, 6]},
        {TOKENS: zeros(1, 64)},
        "adapter.tensor.shape",
    ),
    "rows of tokens that are not named": (
        {},
        {TOKENS: zeros(1, 64)},
        "adapter.unsupported.full_embedding",
    ),
    "other tokens of the tied output matrix, without rows": (
        {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [6]}},
        {TOKENS: zeros(1, 64)},
        "adapter.tensor.missing",
    ),
    "an activated LoRA": (
        {"alora_invocation_tokens": [1], "trainable_token_indices": {"lm_head": [6]}},
        {HEAD_TOKENS: zeros(1, 64)},
        "adapter.unsupported.activated_embedding",
    ),
    "not finite": (
        {"modules_to_save": ["lm_head"]},
        {f"{PREFIX}lm_head.weight": zeros(320, 64) + np.float32("inf")},
        "adapter.tensor.not_finite",
    ),
}
"""Changed configuration, tensors beside the good ones, code."""


def refuse(files: AdapterFiles, code: str) -> AdapterRejected:
    started = time.process_time()
    with pytest.raises(AdapterRejected) as caught:
        validate(files, BASE, STRICT)
    assert caught.value.code == code, str(caught.value)
    # A bound on work, not on speed: a bomb that goes off takes minutes.
    assert time.process_time() - started < 10.0
    assert len(json.dumps(caught.value.to_dict())) < 4096
    assert len(caught.value.hint) > 10
    return caught.value


@pytest.mark.parametrize("kind", WEIGHTS)
def test_bad_weights_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    weights, code = WEIGHTS[kind]
    refuse(write(tmp_path, CONFIG, weights), code)


@pytest.mark.parametrize("kind", CONFIGS)
def test_bad_configs_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    changes, code = CONFIGS[kind]
    config = changes if isinstance(changes, bytes) else CONFIG | changes
    refuse(write(tmp_path, config, GOOD), code)


@pytest.mark.parametrize("kind", REPLACED)
def test_bad_replaced_weights_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    changes, tensors, code = REPLACED[kind]
    refuse(write(tmp_path, CONFIG | changes, encode(*entries(factors() | tensors))), code)


def test_a_resized_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    tensors = {f"{PREFIX}lm_head.weight": zeros(322, 64)}
    weights = encode(*entries(factors() | tensors))
    files = write(tmp_path, CONFIG | {"modules_to_save": ["lm_head"]}, weights)
    error = refuse(files, "adapter.unsupported.resized_vocabulary")
    assert (error.got, error.allowed) == (322, 320)
    assert "322" in error.hint and "320" in error.hint


def test_an_image_over_the_bound_is_refused_with_both_numbers(tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG | BOTH, encode(*entries(factors() | TABLES)))
    layout = ImageLayout(BASE.num_layers, torch.bfloat16, ROWS)
    num_bytes = len(pack(listed(tmp_path), BASE, layout)[1])
    assert num_bytes > 2 * 320 * 64 * 2
    validate(files, BASE, Limits(max_image_bytes=num_bytes))
    with pytest.raises(AdapterRejected) as caught:
        validate(files, BASE, Limits(max_image_bytes=num_bytes - 1))
    error = caught.value
    assert error.code == "adapter.image.too_large"
    assert (error.got, error.allowed) == (num_bytes, num_bytes - 1)


def test_transformers_code_cannot_replace_weights(tmp_path: Path) -> None:
    linear = ModelLinear("model.layers.0.self_attn.q_proj", 0, 64, 64)
    base = msgspec.structs.replace(BASE, linears=(linear,))
    tensors = {name: each for name, each in factors().items() if Q0 in name}
    config = CONFIG | {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    head = {f"{PREFIX}lm_head.weight": zeros(320, 64)}
    with pytest.raises(AdapterRejected) as caught:
        validate(write(tmp_path, config, encode(*entries(tensors | head))), base)
    assert caught.value.code == "adapter.unsupported.replaced_weights"


def test_what_the_corpus_breaks_is_sound(tmp_path: Path) -> None:
    assert validate(write(tmp_path, CONFIG, GOOD), BASE).max_rank == 4


def test_rank_over_the_cap(tmp_path: Path) -> None:
    weights = encode(*entries(factors(rank=129)))
    error = refuse(write(tmp_path, CONFIG | {"r": 129}, weights), "adapter.rank.too_large")
    assert (error.got, error.allowed) == (129, 128)


def _leave_only_pickle(files: AdapterFiles) -> None:
    files.weights.rename(files.weights.with_name("adapter_model.bin"))


def _link_weights(files: AdapterFiles) -> None:
    files.weights.unlink()
    files.weights.symlink_to("/etc/passwd")


def _make_weights_a_folder(files: AdapterFiles) -> None:
    files.weights.unlink()
    files.weights.mkdir()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_leave_only_pickle, "adapter.unsupported.pickle"),
        (_link_weights, "adapter.file.missing"),
        (_make_weights_a_folder, "adapter.file.kind"),
        (lambda files: files.config.unlink(), "adapter.file.missing"),
    ],
)
def test_bad_folders(spoil: Callable[[AdapterFiles], None], code: str, tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG, GOOD)
    spoil(files)
    refuse(files, code)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_to_the_header_is_refused_or_harmless(
    data: st.DataObject, tmp_path: Path
) -> None:
    """Only AdapterRejected comes out, or a manifest of what the bytes still say."""
    raw = bytearray(GOOD)
    length = struct.unpack("<Q", GOOD[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 8 + length - 1))
        raw[position] = data.draw(st.integers(0, 255))
    try:
        validate(write(tmp_path, CONFIG, bytes(raw)), BASE)
    except AdapterRejected as error:
        assert error.code.startswith("adapter.")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.dictionaries(
        st.sampled_from(
            [*CONFIG, "rank_pattern", "alpha_pattern", "init_lora_weights", "layers_pattern"]
        )
        | st.text(max_size=6),
        JSON,
        max_size=3,
    )
)
def test_any_config_is_accepted_or_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    try:
        validate(write(tmp_path, CONFIG | changes, GOOD), BASE, STRICT)
    except AdapterRejected as error:
        json.dumps(error.to_dict())
