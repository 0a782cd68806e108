"""Activated LoRA as peft writes it; what peft refuses beside it is refused here by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from adapters.errors import AdapterRejected
from adapters.format.validator import AdapterFiles
from adapters.manifest import BaseModelShape
from tests.adapters.files import BASE, CONFIG, encode, entries, factors, validate, write
from tests.doubles import make_adapter

INVOCATION = [7, 300, 7]


def test_what_peft_writes_is_accepted(model: Path, base: BaseModelShape, tmp_path: Path) -> None:
    folder = make_adapter(model, tmp_path, rank=4, alora_invocation_tokens=INVOCATION)
    manifest = validate(AdapterFiles.in_folder(folder), base)
    assert manifest.invocation_tokens == tuple(INVOCATION)
    assert manifest.max_rank == 4
    assert manifest.warnings == ()


def test_an_adapter_without_is_not_activated(tmp_path: Path) -> None:
    config = CONFIG | {"alora_invocation_tokens": None}
    files = write(tmp_path, config, encode(*entries(factors())))
    assert validate(files, BASE).invocation_tokens == ()


def test_the_invocation_is_part_of_the_digest(tmp_path: Path) -> None:
    """Other tokens, another adapter: nothing is shared between them but base pages."""
    weights = encode(*entries(factors()))
    digests = {
        validate(
            write(tmp_path / str(n), CONFIG | {"alora_invocation_tokens": tokens}, weights), BASE
        ).digest
        for n, tokens in enumerate([None, [1], [1, 2]])
    }
    assert len(digests) == 3


def test_a_base_without_the_tokens_does_not_fit(tmp_path: Path) -> None:
    config = CONFIG | {"alora_invocation_tokens": [319]}
    files = write(tmp_path, config, encode(*entries(factors())))
    small = BaseModelShape(
        **{field: getattr(BASE, field) for field in BASE.__struct_fields__}
        | {"digest": "c" * 64, "vocab_size": 319}
    )
    assert validate(files, [small, BASE]).base_digest == BASE.digest


def combinations() -> dict[str, dict[str, Any]]:
    from peft.tuners.lora.config import (
        ArrowConfig,
        BdLoraConfig,
        KasaConfig,
        MontecloraConfig,
        VeloraConfig,
    )

    return {
        "dora": {"use_dora": True},
        "mica": {"init_lora_weights": "mica"},
        "bdlora": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["x"], nblocks=2)},
        "arrow": {"arrow_config": ArrowConfig()},
        "kasa": {"kasa_config": KasaConfig()},
        "velora": {"velora_config": VeloraConfig()},
        "monteclora": {"monteclora_config": MontecloraConfig()},
    }


COMBINATIONS = ("dora", "mica", "bdlora", "arrow", "kasa", "velora", "monteclora")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_that_peft_refuses_are_refused(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    options = combinations()[name]
    lora = LoraConfig(
        r=4, target_modules=["0"], task_type="CAUSAL_LM", alora_invocation_tokens=[1], **options
    )
    with pytest.raises(ValueError, match="variant combination"):
        inject_adapter_in_model(lora, nn.Sequential(nn.Linear(8, 8)))
    lora.save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    saved |= {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    files = write(tmp_path, saved, encode(*entries(factors())))
    with pytest.raises(AdapterRejected) as caught:
        validate(files, BASE)
    assert caught.value.code == f"adapter.unsupported.{name}"


def test_dora_says_what_to_change(tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG | {"use_dora": True}, encode(*entries(factors())))
    with pytest.raises(AdapterRejected) as caught:
        validate(files, BASE)
    assert caught.value.code == "adapter.unsupported.dora"
    assert "use_dora=False" in caught.value.hint
