"""Patterns of configurations mean what they mean to peft, and cannot take long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.errors import AdapterRejected
from adapters.format.module_list import ListedModule
from adapters.format.patterns import MAX_PATTERN_LENGTH, PatternMatcher, cpu_limit
from adapters.format.strict_json import decode_object
from adapters.format.validator import Limits, Validated, validate_and_list
from adapters.manifest import PROJECTIONS
from tests.adapters.files import BASE, CONFIG, encode, entries, factors, write

DEEP = msgspec.structs.replace(
    BASE, num_layers=60, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8
)
ATTENTION, MLP = PROJECTIONS[:4], PROJECTIONS[4:]

# As `get_peft_regex` of Unsloth writes it, with the parts that its arguments switch on.
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
EXPRESSIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Unsloth, a model of text": (UNSLOTH, "model.", PROJECTIONS),
    "Unsloth, a model of text and images": (UNSLOTH, "model.language_model.", PROJECTIONS),
    "Axolotl's examples": (
        r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
        "model.language_model.",
        PROJECTIONS,
    ),
    "Axolotl, attention alone": (
        r"language_model.model.layers.[\d]+.self_attn.(q|k|v|o)_proj",
        "language_model.model.",
        ATTENTION,
    ),
    "ms-swift, a model of text and images": (
        r"^(model.language_model(?=\.).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj))$",
        "model.language_model.",
        PROJECTIONS,
    ),
    "ms-swift, without the vision tower": (
        r"^(?!.*(visual|vision_tower|aligner|lm_head)).*\.(gate_proj|up_proj|down_proj)$",
        "model.",
        MLP,
    ),
    "a backreference": (r"model\.layers\.(?P<n>\d)(?P=n)\.mlp\.\w+", "model.", MLP),
    "flags": (r"(?i).*\.Q_PROJ", "model.", ("q_proj",)),
}
LISTED: dict[str, tuple[int, ...]] = {"a backreference": (11, 22, 33, 44, 55)}


def listed(
    folder: Path,
    changes: dict[str, Any],
    layers: tuple[int, ...] = tuple(range(60)),
    projections: tuple[str, ...] = PROJECTIONS,
    root: str = "model.",
) -> Validated:
    tensors = {
        name.replace("base_model.model.model.", f"base_model.model.{root}"): values
        for name, values in factors(4, projections, layers, DEEP).items()
    }
    files = write(folder, CONFIG | changes, encode(*entries(tensors)))
    return validate_and_list(files, [DEEP], Limits(matching_cpu_s=2.0))


@pytest.mark.parametrize("tool", EXPRESSIONS)
def test_expressions_of_tools_are_resolved_on_60_layers(tool: str, tmp_path: Path) -> None:
    """The tensors are exactly the targets: one more is not targeted, and none is missing."""
    expression, root, projections = EXPRESSIONS[tool]
    layers = LISTED.get(tool, tuple(range(60)))
    found = listed(tmp_path, {"target_modules": expression}, layers, projections, root)
    assert not found.manifest.warnings
    wanted = [(n, i) for n in layers for i, name in enumerate(PROJECTIONS) if name in projections]
    assert [(each.layer, each.projection) for each in found.modules] == wanted
    if projections != PROJECTIONS:
        with pytest.raises(AdapterRejected, match="not_targeted"):
            listed(tmp_path, {"target_modules": expression}, layers, PROJECTIONS, root)


def test_the_list_has_each_modules_own_scale(tmp_path: Path) -> None:
    patterns = {"alpha_pattern": {r"layers\.[0-9]\..*v_proj": 16, "layers.1.self_attn.q_proj": 2}}
    found = listed(tmp_path, patterns, (0, 1, 10), ("q_proj", "v_proj"))
    assert found.modules == (
        *(ListedModule(0, 0, 2.0), ListedModule(0, 2, 4.0)),
        *(ListedModule(1, 0, 0.5), ListedModule(1, 2, 4.0)),
        *(ListedModule(10, 0, 2.0), ListedModule(10, 2, 2.0)),
    )


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*)*x"])
def test_a_pattern_that_explodes_is_given_up(pattern: str) -> None:
    matcher = PatternMatcher("target_modules")
    with pytest.raises(AdapterRejected, match="pattern_too_complex"), cpu_limit(0.05):
        matcher.fullmatch(pattern, "a" * 64 + ".")


def test_the_bound_is_one_for_all_base_models(tmp_path: Path) -> None:
    """After the first base model has used it up no other is tried, which would take hours."""
    files = write(
        tmp_path,
        CONFIG | {"target_modules": r"((\w+\.?)+)+!"},
        encode(*entries(factors())),
    )
    bases = [msgspec.structs.replace(BASE, digest=f"{i:064x}") for i in range(100)]
    with pytest.raises(AdapterRejected, match=r"pattern_too_complex.*over 0\.05 s"):
        validate_and_list(files, bases, Limits(matching_cpu_s=0.05))


def test_a_pattern_beyond_the_bound_of_its_length(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match="pattern_too_complex"):
        PatternMatcher("target_modules").fullmatch("a" * (MAX_PATTERN_LENGTH + 1), "a")


def test_json_keeps_its_objects() -> None:
    assert decode_object(b'{"a": {"b": [1, 2.5, null]}}', "code", "field") == {
        "a": {"b": [1, 2.5, None]}
    }
