"""Quantised checkpoints are imported as their own libraries dequantise them.

The files were written by those libraries with `tools/quantized_checkpoints.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from adapters.store.folder import LocalStore
from ops.block_matrix import densify
from tests.doubles import make_tokenizer
from workers.importer import ImportFormat, ImportRefused, import_model
from workers.importer.gguf_tensors import to_bfloat16
from workers.models.checkpoint import Checkpoint

WRITTEN = Path(__file__).with_name("quantized")
CHECKPOINTS = sorted(path.name for path in WRITTEN.iterdir())
K_PROJ = "model.layers.0.self_attn.k_proj"
DOWN_PROJ = "model.layers.0.mlp.down_proj"
DIFFERENCES = {"gptqmodel-gptq-2": 0.7, "gptqmodel-gptq-3": 0.35}
"""Largest relative differences from the model in 8 bits, where 4 bits have 0.2."""
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def source_of(checkpoint: str, folder: Path, change: Change | None = None) -> Path:
    """Writes the source's folder, with a change of its quantization_config or its tensors."""
    folder.mkdir()
    make_tokenizer(folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(WRITTEN / checkpoint / name, folder / name)
    if change is not None:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        change(config["quantization_config"], tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def imported(source: Path, store: Path, weight_format: ImportFormat = "bfloat16") -> Path:
    digest = import_model(source, LocalStore(store), weight_format=weight_format)
    return store / "models" / digest


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_weights_are_those_that_the_library_dequantises(checkpoint: str, tmp_path: Path) -> None:
    source = source_of(checkpoint, tmp_path / "source")
    folder = imported(source, tmp_path)
    weights = load_file(folder / "model.safetensors")
    expected = load_file(WRITTEN / checkpoint / "expected.safetensors")
    assert expected.keys() == {f"{K_PROJ}.weight", f"{DOWN_PROJ}.weight"}
    for name, values in expected.items():
        assert torch.equal(weights[name], values), name
    stored = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(weights[name], stored[name].bfloat16())
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_matrix_is_near_that_of_the_other_formats(checkpoint: str, tmp_path: Path) -> None:
    """All were made of one model, and 8 bits are near it."""
    other = imported(source_of("compressed-tensors-w8", tmp_path / "other"), tmp_path)
    folder = imported(source_of(checkpoint, tmp_path / "source"), tmp_path)
    weights, near = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == near.keys()
    for name, values in near.items():
        difference = (weights[name].float() - values.float()).norm() / values.float().norm()
        assert difference < DIFFERENCES.get(checkpoint, 0.2), name


def test_a_dequantised_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = source_of("bitsandbytes-nf4", tmp_path / "source")
    first = imported(source, tmp_path)
    assert imported(source, tmp_path) == first
    assert imported(source_of("bitsandbytes-fp4", tmp_path / "fp4"), tmp_path) != first
    model = AutoModelForCausalLM.from_pretrained(first)
    assert model.dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_a_dequantised_matrix_can_be_stored_in_blocks(tmp_path: Path) -> None:
    source = source_of("compressed-tensors-w8", tmp_path / "source")
    weights = load_file(imported(source, tmp_path, "int8") / "model.safetensors")
    expected = load_file(WRITTEN / "compressed-tensors-w8" / "expected.safetensors")
    blocks = weights[f"{DOWN_PROJ}.weight.Q8_0"]
    # The blocks are rounded from float32, so their scales may differ in the last bit.
    again = quantize(expected[f"{DOWN_PROJ}.weight"].float().numpy(), GGMLQuantizationType.Q8_0)
    assert blocks.shape == again.shape
    assert (blocks.numpy() == again).mean() > 0.8


KEPT = {
    "autoawq": "Q8_0",
    "compressed-tensors-w4-asymmetric": "Q8_0",
    "compressed-tensors-w4-symmetric": "Q4_0",
    "compressed-tensors-w8": "Q8_0",
    "compressed-tensors-w8a8": "Q8_0",
    "gptqmodel-gptq-2": "Q4_0",
    "gptqmodel-gptq-3": "Q4_0",
    "gptqmodel-gptq-4-asymmetric": "Q8_0",
    "gptqmodel-gptq-4-second-layout": "Q4_0",
    "gptqmodel-gptq-8": "Q8_0",
}
"""Formats that hold a checkpoint's integers exactly. With zero points, 4 bits need 8; columns that
were ordered by their activations do not share scales in blocks."""


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_integers_that_are_kept_have_the_bits_of_the_bfloat16_import(
    checkpoint: str, tmp_path: Path
) -> None:
    source = source_of(checkpoint, tmp_path / "source")
    plain = load_file(imported(source, tmp_path) / "model.safetensors")
    with Checkpoint(imported(source, tmp_path, "keep")) as kept:
        for name, values in plain.items():
            assert torch.equal(densify([kept.get(name)]), values), name
        formats = {format.name for format in kept.formats.values()}
        assert formats == ({KEPT[checkpoint]} if checkpoint in KEPT else set())
        assert len(kept.formats) == (7 if checkpoint in KEPT else 0)


def test_scales_that_no_block_holds_are_not_rounded(tmp_path: Path) -> None:
    def widen(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{K_PROJ}.weight_scale"] = tensors[f"{K_PROJ}.weight_scale"].float() * 1.0001
        tensors[f"{DOWN_PROJ}.weight_scale"] = tensors[f"{DOWN_PROJ}.weight_scale"].float() * 1e6

    source = source_of("compressed-tensors-w4-symmetric", tmp_path / "source", widen)
    plain = load_file(imported(source, tmp_path) / "model.safetensors")
    with Checkpoint(imported(source, tmp_path, "keep")) as kept:
        assert len(kept.formats) == 7 - 2
        for module in (K_PROJ, DOWN_PROJ):
            assert torch.equal(densify([kept.get(f"{module}.weight")]), plain[f"{module}.weight"])


def test_room_is_checked_for_the_dequantised_bytes(tmp_path: Path) -> None:
    source = source_of("bitsandbytes-nf4", tmp_path / "source")
    needed: list[int] = []
    store = LocalStore(tmp_path)
    store.check_room = needed.append
    folder = tmp_path / "models" / import_model(source, store)
    written = (folder / "model.safetensors").stat().st_size
    assert (source / "model.safetensors").stat().st_size < needed[0] <= written
    assert written < needed[0] + 4096


def renamed(old: str, new: str) -> Change:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda config, tensors: tensors.update({name: make(tensors[name]).contiguous()})


def configured(**changes: object) -> Change:
    return lambda config, tensors: config.update(changes)


def json_tensor(value: object) -> torch.Tensor:
    return torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8)


STATE = f"{K_PROJ}.weight.quant_state.bitsandbytes__nf4"
REFUSALS: dict[str, tuple[str, Change, str]] = {
    "an unknown method": (
        "bitsandbytes-nf4",
        configured(quant_method="hqq"),
        "quant_method = 'hqq' is not supported; allowed: awq, bitsandbytes",
    ),
    "no method": ("autoawq", configured(quant_method=None), "quant_method = None"),
    "GPTQ's layout of Marlin": (
        "gptqmodel-gptq-8",
        configured(checkpoint_format="marlin"),
        "checkpoint_format = 'marlin' is not supported; allowed: gptq, gptq_v2",
    ),
    "AWQ's gemv": (
        "autoawq",
        configured(version="gemv"),
        "version = 'gemv' is not supported; allowed: gemm",
    ),
    "AWQ of 8 bits": ("autoawq", configured(bits=8), "bits = 8 is not supported; allowed: 4"),
    "NVFP4": (
        "compressed-tensors-w8",
        configured(format="nvfp4-pack-quantized"),
        "format 'nvfp4-pack-quantized' is not supported",
    ),
    "rotated weights": (
        "compressed-tensors-w8",
        configured(transform_config={"config_groups": {"R1": {}}}),
        "transform_config: weights that were rotated",
    ),
    "sparse weights": (
        "compressed-tensors-w8",
        configured(sparsity_config={"format": "sparse-24-bitmask"}),
        "format 'sparse-24-bitmask' is not supported",
    ),
    "a missing scale": (
        "compressed-tensors-fp8-tensor",
        renamed(f"{K_PROJ}.weight_scale", "model.other"),
        f"tensor {K_PROJ}.weight_scale is missing",
    ),
    "a tensor of no module": (
        "gptqmodel-gptq-8",
        lambda config, tensors: tensors.update({"model.extra.qweight": torch.zeros(1)}),
        "tensor model.extra.qweight belongs to no module of llama",
    ),
    "a bias that is not zero": (
        "gptqmodel-gptq-8",
        lambda config, tensors: tensors.update({f"{K_PROJ}.bias": torch.ones(32)}),
        f"tensor {K_PROJ}.bias belongs to no module of llama",
    ),
    "groups beyond the scales": (
        "gptqmodel-gptq-4-act-order",
        replaced(f"{K_PROJ}.g_idx", lambda groups: groups + 1),
        f"tensor {K_PROJ}.g_idx names groups beyond its 2",
    ),
    "words of no width": (
        "gptqmodel-gptq-8",
        replaced(f"{K_PROJ}.qweight", lambda words: words[:10]),
        "has not 64 columns of 2, 3, 4, 8 bits",
    ),
    "a wrong size of groups": (
        "autoawq",
        configured(group_size=24),
        "group_size 24 does not make 2 groups of 64 columns",
    ),
    "scales of another shape": (
        "transformers-fp8-block",
        configured(weight_block_size=[16, 32]),
        r"weight_scale_inv has shape \(2, 2\), it should be .* or \(4, 2\)",
    ),
    "no pair of block sizes": (
        "transformers-fp8-block",
        configured(weight_block_size=[0, 32]),
        r"weight_block_size = \[0, 32\] is no pair of sizes",
    ),
    "a matrix of another shape": (
        "bitsandbytes-nf4",
        replaced(STATE, lambda _: json_tensor({"blocksize": 64, "shape": [64, 32]})),
        r"says shape \[64, 32\], config.json says \(32, 64\)",
    ),
    "a state without its size of blocks": (
        "bitsandbytes-nf4",
        replaced(STATE, lambda _: json_tensor({"blocksize": 0, "shape": [32, 64]})),
        f"tensor {STATE}: Expected `int` >= 1",
    ),
    "too few bytes": (
        "bitsandbytes-nf4",
        replaced(f"{K_PROJ}.weight", lambda codes: codes[:-1]),
        f"tensor {K_PROJ}.weight has 1023 bytes",
    ),
    "too few scales": (
        "bitsandbytes-nf4-double",
        replaced(f"{K_PROJ}.weight.nested_absmax", lambda scales: scales[:0]),
        "nested_absmax has shape",
    ),
    "rows in another order": (
        "bitsandbytes-int8",
        replaced(f"{K_PROJ}.weight_format", lambda layout: layout + 1),
        "weight_format is not 0",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    checkpoint, change, words = REFUSALS[case]
    source = source_of(checkpoint, tmp_path / "source", change)
    with pytest.raises(ImportRefused, match=words):
        import_model(source, LocalStore(tmp_path / "store"))
    assert not [*(tmp_path / "store").rglob("config.json")]


def test_a_family_that_joins_its_projections_is_refused_by_name(tmp_path: Path) -> None:
    source = source_of("bitsandbytes-nf4", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))
    with pytest.raises(ImportRefused, match="of the family phi3 are not supported"):
        import_model(source, LocalStore(tmp_path / "store"))


def test_a_bias_of_zeros_is_left_out(tmp_path: Path) -> None:
    """AutoGPTQ stored one with every matrix, also where the model has none."""

    def add(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{K_PROJ}.bias"] = torch.zeros(32, dtype=torch.float16)

    folder = imported(source_of("gptqmodel-gptq-8", tmp_path / "source", add), tmp_path)
    assert f"{K_PROJ}.bias" not in load_file(folder / "model.safetensors")


def test_rounding_is_to_nearest_even() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20])
    rounded = torch.from_numpy(to_bfloat16(values.numpy())).view(torch.bfloat16)
    assert torch.equal(rounded, values.bfloat16())
