"""Workers bind adapters by the list that the upload stored, and match no pattern themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.errors import AdapterRejected
from adapters.format.module_list import MODULES_NAME, read_module_list, write_module_list
from adapters.format.validator import AdapterFiles, Limits, validate_and_list
from adapters.pool.factors import Factors
from adapters.pool.lora import ImageLayout, pack
from ops.factor_layout import ROWS
from tests.adapters.files import BASE, CONFIG, encode, entries, factors, write

LAYOUT = ImageLayout(BASE.num_layers, torch.float32, ROWS)
PATTERNS = {
    "target_modules": r".*\.(q|v)_proj",
    "alpha_pattern": {r"layers\.1\..*": 2},
}
EXPLODING = {"target_modules": r"((\w+\.?)+)+!"}


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    return write(tmp_path, CONFIG | PATTERNS, encode(*entries(factors())))


def image(files: AdapterFiles) -> Tensor:
    return pack(files, BASE, LAYOUT)[1]


def test_no_pattern_is_matched_where_the_list_is_stored(files: AdapterFiles) -> None:
    validated = validate_and_list(files, [BASE], Limits())
    assert [each.scale for each in validated.modules] == [2.0, 2.0, 0.5, 0.5]
    write_module_list(files.config.parent, validated.modules)
    assert read_module_list(files.config.parent) == list(validated.modules)
    expected = image(files)
    files.config.write_text(json.dumps(CONFIG | EXPLODING))
    assert torch.equal(image(files), expected)
    found = Factors(files, BASE).read(1, 0)
    assert found is not None
    weights = factors()["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(found[1], torch.from_numpy(weights) * 0.5)


@pytest.mark.parametrize(
    "stored",
    [b"[[0,0,2.0]]", b"[[0,0,2.0],[0,2,2.0],[1,0,2.0],[1,3,2.0]]", b"{}", b"[[0,0]]", b"x" * 2**21],
)
def test_a_list_of_other_modules_is_refused(files: AdapterFiles, stored: bytes) -> None:
    with pytest.raises(AdapterRejected, match=r"adapter\.store\.modules") as missing:
        image(files)
    assert str(files.config.parent) not in str(missing.value)
    (files.config.parent / MODULES_NAME).write_bytes(stored)
    with pytest.raises(AdapterRejected, match=r"adapter\.store\.modules"):
        image(files)
