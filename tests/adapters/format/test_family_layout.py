"""Adapters of families that join projections bind to the projections that they join."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from adapters.errors import AdapterRejected
from adapters.family_layout import head_order
from adapters.format.validator import AdapterFiles
from adapters.manifest import BaseModelShape
from tests.adapters.files import BASE, validate
from tests.doubles import make_adapter, make_model


def test_rows_of_a_head_keep_their_partner() -> None:
    """Row j of the canonical order and row j + D / 2 are a pair that the family rotates."""
    assert head_order(8, 8, False) is None
    assert head_order(8, 4, False) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert head_order(8, 4, True) == (0, 2, 4, 5, 1, 3, 6, 7)


def test_a_joined_adapter_is_all_its_projections(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "phi3")
    folder = make_adapter(model, tmp_path / "adapter", targets=["qkv_proj", "down_proj"])
    base = BaseModelShape.from_config(
        {**json.loads((model / "config.json").read_text()), "rotary_dim": 12}, "digest"
    )
    manifest = validate(AdapterFiles.in_folder(folder), base)
    assert manifest.projections == ("q_proj", "k_proj", "v_proj", "down_proj")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert manifest.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    name = next(name for name in tensors if "qkv_proj.lora_B" in name)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterRejected, match=r"qkv_proj"):
        validate(AdapterFiles.in_folder(folder), base)


def test_a_joined_module_is_unknown_where_none_is_joined(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "phi3")
    folder = make_adapter(model, tmp_path / "adapter", targets=["qkv_proj"])
    with pytest.raises(AdapterRejected) as refused:
        validate(AdapterFiles.in_folder(folder), BASE)
    assert refused.value.code == "adapter.tensor.unbound"
