"""GGUF files become canonical folders that transformers reads as the model they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.store.folder import LocalStore
from ops.registry import select
from tests.doubles import make_model
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from tests.workers.tiny_gguf import write_gguf
from workers.importer import ImportRefused, import_model
from workers.importer.gguf import read_chat_templates
from workers.importer.gguf_tensors import to_bfloat16
from workers.layers.rope_spec import RopeSpec
from workers.layers.rotary import inverse_frequencies
from workers.models import read_spec
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")


def make_bfloat16_model(folder: Path, family: str, **changes: Any) -> Path:
    make_model(folder, family, **changes)
    path = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def llama3_factors(head_dim: int = 16) -> np.ndarray:
    """What the converter computes for the published parameters and base 10,000."""
    spec = RopeSpec(10_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(RopeSpec(10_000.0), head_dim)
    return (plain / inverse_frequencies(spec, head_dim)).numpy()


def test_rounding_is_as_torch_has_it() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 100_000, np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    values = np.concatenate((bits, ties)).view(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    rounded = torch.from_numpy(to_bfloat16(values)).view(torch.bfloat16)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded[~rounded.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_gives_the_weights_and_config_back(family: str, tmp_path: Path) -> None:
    model = make_bfloat16_model(tmp_path / "model", family)
    gguf = write_gguf(model, tmp_path / "model.gguf")
    folder = tmp_path / "models" / import_model(gguf, LocalStore(tmp_path))
    original = load_file(model / "model.safetensors")
    imported = load_file(folder / "model.safetensors")
    assert imported.keys() == original.keys()
    for name, tensor in imported.items():
        assert tensor.dtype == torch.bfloat16
        exact = not name.endswith(("down_proj.weight", "norm.weight"))
        atol = 0 if exact else 0.005
        torch.testing.assert_close(tensor, original[name], atol=atol, rtol=0, msg=name)
    specs = [read_spec(json.loads((path / "config.json").read_text())) for path in (model, folder)]
    if family == "gemma3_text":  # GGUF keeps no pattern: the sixth layer is the first full one
        assert [layer.window for layer in specs[1].layers] == [24, 24]
    else:
        assert specs[0] == specs[1]


def test_transformers_reads_the_folder_as_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_bfloat16_model(tmp_path / "model", "qwen3")
    gguf = write_gguf(model, tmp_path / "model.gguf")
    folder = tmp_path / "models" / import_model(gguf, LocalStore(tmp_path))
    tokens = torch.tensor([[5, 9, 200, 31]])
    logits = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
        for path in (model, folder)
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=0.05, rtol=0.05)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|im_end|>")
    assert tokenizer.decode(tokenizer("Grüße, 你好")["input_ids"]) == "Grüße, 你好"


def test_llama3_rope_factors_become_parameters(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    factors = {"rope_freqs.weight": llama3_factors()}
    gguf = write_gguf(model, tmp_path / "model.gguf", tensors=factors)
    folder = tmp_path / "models" / import_model(gguf, LocalStore(tmp_path))
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    assert spec.layers[0].rope == RopeSpec(10_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("error", "named", "metadata"),
    [
        (ImportRefused, "tokenizer.ggml.pre = 'chameleon'", {"tokenizer.ggml.pre": "chameleon"}),
        (ImportRefused, "tokenizer.ggml.model = 'bert'", {"tokenizer.ggml.model": "bert"}),
        (ImportRefused, "split.count", {"split.count": 2}),
        (ImportRefused, "expert_count", {"llama.expert_count": 8}),
        (ImportRefused, "rope.dimension_count", {"llama.rope.dimension_count": 8}),
        (ImportRefused, "shape", {"llama.feed_forward_length": 128}),
        (ImportRefused, "missing", {"llama.block_count": 3}),
        (ImportRefused, "belongs to no module", {"llama.block_count": 1}),
        (ImportRefused, "embedding_length", {"llama.embedding_length": None}),
        (ImportRefused, "tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": None}),
        (ImportRefused, "tokenizer.ggml.merges", {"tokenizer.ggml.merges": None}),
        (ImportRefused, "tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": None}),
        (
            ImportRefused,
            "yarn",
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        ),
    ],
)
def test_unsupported_files_are_refused_by_name_and_leave_nothing(
    error: type[ValueError], named: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama")
    gguf = write_gguf(model, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(error, match=named):
        import_model(gguf, LocalStore(tmp_path))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_special_token_beyond_the_vocabulary_is_none(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    metadata = {"tokenizer.ggml.padding_token_id": 0xFFFFFFFF}
    store = LocalStore(tmp_path)
    digest = import_model(write_gguf(model, tmp_path / "model.gguf", metadata=metadata), store)
    config = json.loads((store.model_folder(digest) / "tokenizer_config.json").read_text())
    assert "pad_token" not in config


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias", "cls.weight"])
def test_stray_tensors_are_refused(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    extra = {name: np.zeros(64, np.float32)}
    gguf = write_gguf(model, tmp_path / "model.gguf", tensors=extra)
    with pytest.raises(ImportRefused, match="tensor"):
        import_model(gguf, LocalStore(tmp_path))


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "rope_freqs.weight"])
def test_tensors_of_types_that_no_weights_have_are_refused(
    name: str, dtype: type, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama")
    shape = (8,) if name.startswith("rope") else (64, 64)
    tensors = {name: np.ones(shape, dtype)}
    gguf = write_gguf(model, tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(ImportRefused, match=f"tensor {name} is (I8|F64)"):
        import_model(gguf, LocalStore(tmp_path))


def test_rope_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    gguf = write_gguf(model, tmp_path / "model.gguf", tensors=factors)
    with pytest.raises(ImportRefused, match=r"rope_freqs\.weight"):
        import_model(gguf, LocalStore(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model, not at all" * 10)
    for path in (broken, tmp_path / "absent.gguf", Path(__file__)):
        with pytest.raises(ImportRefused):
            import_model(path, LocalStore(tmp_path))


def test_import_is_idempotent_and_reports_progress(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "gemma2")
    gguf = write_gguf(model, tmp_path / "model.gguf")
    calls: list[tuple[int, int]] = []
    first = import_model(
        gguf, LocalStore(tmp_path), lambda done, total: calls.append((done, total))
    )
    assert import_model(gguf, LocalStore(tmp_path)) == first
    assert [path.name for path in (tmp_path / "models").iterdir()] == [first]
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


@pytest.mark.full
def test_demo_model_answers_as_under_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    digest = import_model(demo_gguf(), LocalStore(tmp_path))
    folder = tmp_path / "models" / digest
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name the capital of France."}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = oracle.generate(  # pyright: ignore[reportAttributeAccessIssue]
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False
    )
    ops = select("reference")
    model = PagedModel(load_model(ModelPlan.read(folder, digest, torch.float32), ops), ops)
    answer = expected[0, len(prompt) :].tolist()
    assert model.generate(Stream(), prompt, len(answer)) == answer
    assert "Paris" in tokenizer.decode(answer)
    assert model.model.plan.spec.eos_token_ids == (2,)


def test_a_file_s_templates_are_joined() -> None:
    metadata = {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_template.rag": "R",
    }
    templates = read_chat_templates(metadata)
    assert templates == {"default": "D", "tool_use": "T", "rag": "R"}
    assert read_chat_templates({}) == {}
