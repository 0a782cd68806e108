"""Adapters that change nothing, in whole or in part, are accepted and said to be so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.files import BASE, CONFIG, encode, entries, factors, validate, write

ALPHA, B, A = "lora_alpha (or its alpha_pattern) is 0", "lora_B is zero", "lora_A is zero"

WHOLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "alpha 0": ({"lora_alpha": 0}, "", ALPHA),
    "alpha 0.0": ({"lora_alpha": 0.0}, "", ALPHA),
    "alpha -0.0": ({"lora_alpha": -0.0}, "", ALPHA),
    "alpha 0 with rsLoRA": ({"lora_alpha": 0, "use_rslora": True}, "", ALPHA),
    "every pattern 0": ({"alpha_pattern": {"q_proj": 0, "v_proj": 0}}, "", ALPHA),
    "one pattern for all 0": ({"alpha_pattern": {r".*": 0}}, "", ALPHA),
    "B is zero": ({}, "lora_B", B),
    "A is zero": ({}, "lora_A", A),
    "pattern 0, and B of the others zero": (
        {"alpha_pattern": {"q_proj": 0}},
        "v_proj.lora_B",
        f"{B} or {ALPHA}",
    ),
}

PART: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "a pattern 0": ({"alpha_pattern": {"q_proj": 0}}, "", 2, ALPHA),
    "a pattern 0 of one layer": ({"alpha_pattern": {"layers.0.self_attn.q_proj": 0}}, "", 1, ALPHA),
    "alpha 0 with a pattern that is not": (
        {"lora_alpha": 0, "alpha_pattern": {"v_proj": 8}},
        "",
        2,
        ALPHA,
    ),
    "B of one layer zero": ({}, "layers.1.self_attn.v_proj.lora_B", 1, B),
}


def files(folder: Path, changes: dict[str, Any], zeroed: str):
    tensors = {
        name: array * 0 if zeroed and zeroed in name else array for name, array in factors().items()
    }
    return write(folder, CONFIG | changes, encode(*entries(tensors)))


@pytest.mark.parametrize("kind", WHOLE)
def test_an_adapter_that_equals_its_base(kind: str, tmp_path: Path) -> None:
    changes, zeroed, because = WHOLE[kind]
    manifest = validate(files(tmp_path, changes, zeroed), BASE)
    assert manifest.equals_base
    assert manifest.warnings == (
        f"the version equals its base model, because {because}: it does not become prod by itself",
    )


@pytest.mark.parametrize("kind", PART)
def test_an_adapter_with_modules_that_equal_the_base(kind: str, tmp_path: Path) -> None:
    changes, zeroed, num_idle, because = PART[kind]
    manifest = validate(files(tmp_path, changes, zeroed), BASE)
    assert not manifest.equals_base
    assert manifest.warnings == (
        f"{num_idle} of 4 adapted modules equal the base's, because {because}",
    )


def test_an_adapter_that_changes_every_module(tmp_path: Path) -> None:
    manifest = validate(files(tmp_path, {"lora_alpha": -1}, ""), BASE)
    assert (manifest.equals_base, manifest.warnings) == (False, ())
