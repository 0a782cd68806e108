"""What peft writes is accepted, and the packed image is what peft computes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import AdapterRejected
from adapters.format.validator import AdapterFiles, content_digest
from adapters.manifest import PROJECTIONS, AdapterManifest, BaseModelShape
from adapters.pool.lora import ImageLayout, pack
from ops.factor_layout import PANELS, ROWS, FactorLayout
from tests.adapters.files import BASE, CONFIG, encode, entries, factors, listed, validate, write
from tests.doubles import make_adapter, make_model
from tests.ops.packed_factor import read_factor

REGEX = r"model\.layers\.(0|1)\.(self_attn\.(q|o)_proj|mlp\.down_proj)"

KINDS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1},
    "rank 4": {"rank": 4},
    "rank 5": {"rank": 5},
    "rank 12": {"rank": 12},
    "rank 64": {"rank": 64},
    "rsLoRA": {"rank": 8, "use_rslora": True},
    "fractional alpha": {"alpha": 0.5},
    "patterns": {
        "targets": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {r"^.*1\.mlp\.down_proj": 7, "down_proj": 5, "q_proj": 3},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 31, "k_proj": 2},
    },
    "rsLoRA with patterns": {
        "use_rslora": True,
        "targets": ["q_proj", "up_proj"],
        "rank_pattern": {"(q|k)_proj": 9},
        "alpha_pattern": {"up_proj": 5},
    },
    "regex": {"targets": REGEX},
    "lookahead": {"targets": r"^(?!.*mlp).*(?:q_proj|v_proj)$"},
    "layers": {"targets": ["v_proj", "gate_proj"], "layers_to_transform": [1]},
    "layers with pattern": {
        "targets": ["v_proj", "gate_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "excluded": {"targets": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "random init": {"init_lora_weights": False},
    "output matrix": {"targets": ["q_proj", "lm_head"], "alpha_pattern": {"lm_head": 3}},
    "output matrix alone": {"targets": ["lm_head"], "use_rslora": True},
    "embedding": {"targets": ["v_proj", "embed_tokens"], "rank_pattern": {"embed_tokens": 5}},
    "both": {"targets": r".*(embed_tokens|lm_head|down_proj)"},
}


SPELLINGS = {
    "language_model inside model": (r"model\.layers", "model.language_model.layers"),
    "model inside language_model": (r"model\.layers", "language_model.model.layers"),
    "language_model alone": (r"model\.layers", "language_model.layers"),
    "adapter named default": (r"(lora_[AB])", r"\1.default"),
    "adapter named bot-1": (r"(lora_[AB])", r"\1.bot-1"),
    "torch.compile of all": (r"^", "_orig_mod."),
    "torch.compile of the base": (r"^base_model\.model\.", "base_model.model._orig_mod."),
    "torch.compile of each layer": (r"(layers\.\d+)", r"\1._orig_mod"),
    "DistributedDataParallel": (r"^", "module."),
    "FSDP": (r"(layers\.\d+)", r"\1._fsdp_wrapped_module._checkpoint_wrapped_module"),
    "several at once": (
        r"^base_model\.model\.(.*lora_.)",
        r"module.base_model.model._orig_mod.\1.x",
    ),
}
"""Spellings of tensor names that training tools write and peft does not: pattern, replacement."""


@pytest.fixture(scope="module", params=KINDS)
def saved(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"), **KINDS[request.param])


def peft_deltas(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Module path -> delta weight [out, in], as peft computes it from its own files."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, str(adapter))
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()  # type: ignore[operator]
        for name, module in peft_model.named_modules()
        if isinstance(module, LoraLayer)
    }


def image_deltas(
    adapter: Path, base: BaseModelShape, layout: ImageLayout
) -> dict[str, torch.Tensor]:
    tables, image = pack(listed(adapter, base), base, layout)
    deltas: dict[str, torch.Tensor] = {}
    for layer, projection in np.argwhere(tables.rank > 0).tolist():
        rank = int(tables.rank[layer, projection])
        module = base.modules(layer)[projection]
        k, n = base.projection_shape(layer, module)

        is_embedding = module == "embed_tokens"
        numbers = [
            image[int(offsets[layer, projection]) :].view(layout.dtype)
            for offsets in (tables.a_offset, tables.b_offset)
        ]
        a_shape = (k, rank) if is_embedding else (rank, k)
        a = read_factor(numbers[0], *a_shape, ROWS if is_embedding else layout.factors)
        b = read_factor(numbers[1], n, rank, layout.factors)
        deltas[base.module_path(layer, module)] = a @ b.T if is_embedding else b @ a
    return deltas


@pytest.mark.parametrize("factors", [ROWS, PANELS], ids=["rows", "panels"])
def test_image_is_what_peft_computes(
    saved: Path, model: Path, base: BaseModelShape, factors: FactorLayout
) -> None:
    expected = peft_deltas(model, saved)
    layout = ImageLayout(base.num_layers, torch.float32, factors)
    found = image_deltas(saved, base, layout)
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-6)


def test_manifest_says_what_the_adapter_touches(
    saved: Path, model: Path, base: BaseModelShape
) -> None:
    manifest = validate(AdapterFiles.in_folder(saved), base)
    names = peft_deltas(model, saved)
    assert {name.rpartition(".")[2] for name in names} == set(manifest.projections)
    layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
    assert layers == set(manifest.layers)
    assert manifest.base_digest == base.digest
    assert manifest.digest == content_digest(AdapterFiles.in_folder(saved))
    repeated = {"embed_tokens", "lm_head"} & set(manifest.projections)
    assert len(manifest.warnings) == len(repeated)
    assert all("the file repeats the base model's" in warning for warning in manifest.warnings)


def test_bfloat16_image_is_rounded_once(model: Path, base: BaseModelShape, tmp_path: Path) -> None:
    adapter = make_adapter(model, tmp_path, rank=5, alpha=7)
    layout = ImageLayout(base.num_layers, torch.float32, ROWS)
    files = listed(adapter, base)
    exact_tables, exact = pack(files, base, layout)
    tables, image = pack(files, base, replace(layout, dtype=torch.bfloat16))
    at = (1, PROJECTIONS.index("down_proj"))
    k, n = base.projection_shape(1, "down_proj")
    for offsets, exact_offsets, width in (
        (tables.a_offset, exact_tables.a_offset, k),
        (tables.b_offset, exact_tables.b_offset, n),
    ):
        begin, exact_begin = int(offsets[at]), int(exact_offsets[at])
        rounded = image[begin : begin + 5 * width * 2].view(torch.bfloat16)
        source = exact[exact_begin : exact_begin + 5 * width * 4].view(torch.float32)
        assert torch.equal(rounded, source.bfloat16())


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_other_families(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family)
    adapter = make_adapter(model, tmp_path / "adapter", rank=4)
    shape = BaseModelShape.from_config(json.loads((model / "config.json").read_text()), "c" * 64)
    manifest = validate(AdapterFiles.in_folder(adapter), shape)
    assert manifest.projections == PROJECTIONS


def test_no_task_type(model: Path, base: BaseModelShape, tmp_path: Path) -> None:
    """peft then writes the base's class into `auto_mapping`, which is read and never imported."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    manifest = validate(AdapterFiles.in_folder(tmp_path), base)
    assert manifest.warnings == (
        "the version equals its base model, because lora_B is zero:"
        " it does not become prod by itself",
    )
    assert manifest.equals_base


@pytest.mark.parametrize(
    "mapping",
    [
        {
            "base_model_class": "LlamaForCausalLM",
            "parent_library": "transformers.models.llama.modeling_llama",
            "unsloth_fixed": True,
        },
        {"base_model_class": "Gemma3ForConditionalGeneration", "unsloth_fixed": True},
    ],
)
def test_what_unsloth_writes(base: BaseModelShape, tmp_path: Path, mapping: dict[str, Any]) -> None:
    assert validate(good(tmp_path, auto_mapping=mapping, task_type=None), base)


def good(folder: Path, **changes: Any) -> AdapterFiles:
    return write(folder, CONFIG | changes, encode(*entries(factors())))


def accept(files: AdapterFiles, *bases: BaseModelShape) -> AdapterManifest:
    return validate(files, bases)


def test_the_only_base_that_fits_is_found(tmp_path: Path) -> None:
    wider = replace_base(digest="c" * 64, hidden_size=128)
    assert accept(good(tmp_path), wider, BASE, BASE).base_digest == BASE.digest


def test_two_bases_that_fit_are_ambiguous(tmp_path: Path) -> None:
    twin = replace_base(digest="c" * 64)
    with pytest.raises(AdapterRejected) as caught:
        accept(good(tmp_path), BASE, twin)
    assert caught.value.code == "adapter.base.ambiguous"
    assert caught.value.allowed == [BASE.digest, twin.digest]


def test_no_base_fits(tmp_path: Path) -> None:
    shallow = replace_base(digest="d" * 64, num_layers=1)
    wider = replace_base(digest="c" * 64, hidden_size=128)
    for bases in [(), (shallow, wider)]:
        with pytest.raises(AdapterRejected) as caught:
            accept(good(tmp_path), *bases)
        assert caught.value.code == "adapter.base.mismatch"


def test_targets_without_tensors_are_told(tmp_path: Path) -> None:
    manifest = accept(good(tmp_path, target_modules=["q_proj", "v_proj", "up_proj"]), BASE)
    assert manifest.warnings == ("2 targeted modules have no tensors and stay as in the base",)


def test_digest_covers_both_files_and_their_border(tmp_path: Path) -> None:
    first = content_digest(write(tmp_path / "a", b"ab", b"c"))
    assert first != content_digest(write(tmp_path / "b", b"a", b"bc"))
    assert first == content_digest(write(tmp_path / "c", b"ab", b"c"))


def test_validating_needs_no_torch(tmp_path: Path) -> None:
    good(tmp_path)
    code = (
        "import sys, pathlib, adapters.store.folder;"
        "from adapters.format.validator import AdapterFiles, Limits, validate_and_list;"
        "from tests.adapters.files import BASE;"
        f"files = AdapterFiles.in_folder(pathlib.Path({str(tmp_path)!r}));"
        "validate_and_list(files, [BASE], Limits());"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def replace_base(**changes: Any) -> BaseModelShape:
    import msgspec

    return msgspec.structs.replace(BASE, **changes)


def test_eva_is_plain_lora(model: Path, base: BaseModelShape, tmp_path: Path) -> None:
    """It initialises A from data, distributes ranks, and leaves the base's weights alone."""
    from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    lora = LoraConfig(
        r=4,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
    )
    untrained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = get_peft_model(untrained, lora, low_cpu_mem_usage=True)
    tokens = [torch.randint(base.vocab_size, (8, 16)) for _ in range(8)]
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]
    initialize_lora_eva_weights(trained, batches, show_progress_bar=False)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained.save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["init_lora_weights"] == "eva" and config["eva_config"] and config["rank_pattern"]
    assert validate(AdapterFiles.in_folder(tmp_path), base).warnings == ()
    expected = peft_deltas(model, tmp_path)
    found = image_deltas(tmp_path, base, ImageLayout(base.num_layers, torch.float32, ROWS))
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_names_are_the_same_adapter(
    spelling: str, model: Path, base: BaseModelShape, tmp_path: Path
) -> None:
    """The worker binds the same factors that peft computes with from its own names."""
    adapter = make_adapter(model, tmp_path / "adapter", **KINDS["patterns"], seed=3)
    config = json.loads((adapter / "adapter_config.json").read_text())
    expected = peft_deltas(model, adapter)
    # Patterns are of the paths in the model that was trained, which may begin otherwise.
    config["alpha_pattern"] = {
        "layers.0.self_attn.q_proj" if "model.layers" in key else key: value
        for key, value in config["alpha_pattern"].items()
    }
    weights = load_file(adapter / "adapter_model.safetensors")
    old, new = SPELLINGS[spelling]
    renamed = {re.sub(old, new, name): value for name, value in weights.items()}
    assert len(renamed) == len(weights) and not renamed.keys() & weights.keys()
    files = AdapterFiles.in_folder(tmp_path / "renamed")
    files.config.parent.mkdir()
    files.config.write_text(json.dumps(config))
    save_file(renamed, files.weights)
    assert validate(files, base).warnings == ()
    found = image_deltas(
        files.config.parent, base, ImageLayout(base.num_layers, torch.float32, ROWS)
    )
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-6)


def test_the_text_model_of_a_model_of_text_and_images(tmp_path: Path) -> None:
    """peft's own names and pattern on Gemma 3, as Unsloth's notebooks train it."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = make_model(tmp_path / "model", "gemma3_text")
    text_config = json.loads((text / "config.json").read_text())
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text_config, vision_config=vision, mm_tokens_per_image=4)
    lora = LoraConfig(
        r=4,
        target_modules=r".*language.*\.(q_proj|v_proj|down_proj)",
        rank_pattern={"v_proj": 3},
        init_lora_weights=False,
    )
    trained = get_peft_model(Gemma3ForConditionalGeneration(config), lora)
    trained.save_pretrained(str(tmp_path / "adapter"))
    expected = {
        name.removeprefix("base_model.model.").replace("language_model.", ""): module
        for name, module in trained.named_modules()
        if isinstance(module, LoraLayer)
    }
    shape = BaseModelShape.from_config(text_config, "c" * 64)
    assert validate(AdapterFiles.in_folder(tmp_path / "adapter"), shape).warnings == ()
    layout = ImageLayout(shape.num_layers, torch.float32, ROWS)
    found = image_deltas(tmp_path / "adapter", shape, layout)
    assert found and found.keys() == expected.keys()
    for name, delta in found.items():
        wanted = expected[name].get_delta_weight("default").detach()  # type: ignore[operator]
        torch.testing.assert_close(delta, wanted, rtol=1e-5, atol=1e-6)


def test_names_without_model_are_taken_for_all_tensors_or_none(tmp_path: Path) -> None:
    """As AutoModel has them; a mixture is of no model."""
    tensors = factors()
    bare = {name.replace(".model.model.", ".model."): each for name, each in tensors.items()}
    config = CONFIG | {"task_type": "FEATURE_EXTRACTION"}
    manifest = accept(write(tmp_path, config, encode(*entries(bare))), BASE)
    assert manifest.layers == (0, 1) and manifest.projections == ("q_proj", "v_proj")
    last = [*bare][-1]
    mixed = {name: each for name, each in bare.items() if name != last} | {
        [*tensors][-1]: bare[last]
    }
    with pytest.raises(AdapterRejected) as caught:
        accept(write(tmp_path, config, encode(*entries(mixed))), BASE)
    assert caught.value.code == "adapter.tensor.two_namings"
