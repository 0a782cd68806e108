"""Models whose matrices are stored in blocks compute what their bfloat16 forms compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adapters.store.folder import LocalStore
from ops.block_matrix import BlockMatrix
from ops.registry import select
from ops.weight_format import WeightFormat
from tests.doubles import make_model
from tests.workers.paged import PagedModel, Stream
from tests.workers.real_model import demo_gguf
from tests.workers.tiny_gguf import write_gguf
from workers.importer import ImportFormat, import_model
from workers.models.checkpoint import Checkpoint, CheckpointError
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def imported(source: Path, store: Path, weight_format: ImportFormat) -> Path:
    digest = import_model(source, LocalStore(store), weight_format=weight_format)
    return store / "models" / digest


def answer(folder: Path, backend: str, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    ops = select(backend)
    model = PagedModel(load_model(ModelPlan.read(folder, "tiny", dtype), ops), ops)
    return model.generate(Stream(), list(range(1, 40)), 12)


def dequantized(folder: Path, target: Path) -> Path:
    """Writes a folder whose matrices are the bfloat16 forms of those in blocks."""
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name, _, suffix = stored.rpartition(".")
        if suffix in WeightFormat.__members__:
            values = dequantize(tensor.numpy(), GGMLQuantizationType[suffix])
            tensors[name] = torch.from_numpy(values).bfloat16()
        else:
            tensors[stored] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("source", ["huggingface", "gguf"])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_a_quantised_model_answers_as_its_bfloat16_form(
    tmp_path: Path, family: str, source: str, weight_format: ImportFormat
) -> None:
    model = make_model(tmp_path / "model", family, **SIZES)
    if source == "gguf":
        model = write_gguf(model, tmp_path / "model.gguf")
    folder = imported(model, tmp_path, weight_format)
    plain = dequantized(folder, tmp_path / "plain")
    for backend in ("cpu", "reference"):
        assert answer(folder, backend) == answer(plain, backend)
    assert answer(folder, "cpu", torch.float32) == answer(plain, "cpu", torch.float32)


def test_layers_are_4_bit_and_tables_8_bit(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", **SIZES, tie_word_embeddings=False)
    with Checkpoint(imported(model, tmp_path, "int4"), "np") as checkpoint:
        tables = {"model.embed_tokens.weight", "lm_head.weight"}
        assert {
            name for name, each in checkpoint.formats.items() if each is WeightFormat.Q8_0
        } == tables
        layers = {name for name, each in checkpoint.formats.items() if each is WeightFormat.Q4_0}
        assert len(layers) == 7 * 2


@pytest.mark.parametrize("source", ["huggingface", "gguf"])
def test_tables_have_a_format_of_their_own_if_asked(tmp_path: Path, source: str) -> None:
    model = make_model(tmp_path / "model", "llama", **SIZES, tie_word_embeddings=False)
    if source == "gguf":
        model = write_gguf(model, tmp_path / "model.gguf")
    store = LocalStore(tmp_path)
    digest = import_model(model, store, weight_format="int4", table_format="bfloat16")
    with Checkpoint(tmp_path / "models" / digest, "np") as checkpoint:
        assert set(checkpoint.formats.values()) == {WeightFormat.Q4_0}
        assert len(checkpoint.formats) == 7 * 2
    digest = import_model(model, store, table_format="int8")
    with Checkpoint(tmp_path / "models" / digest, "np") as checkpoint:
        assert set(checkpoint.formats) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_rows_that_are_not_whole_blocks_stay_as_they_are(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", **SIZES | {"intermediate_size": 100})
    with Checkpoint(imported(model, tmp_path, "int8"), "np") as checkpoint:
        assert "model.layers.0.mlp.up_proj.weight" in checkpoint.formats
        assert "model.layers.0.mlp.down_proj.weight" not in checkpoint.formats


@pytest.mark.full
def test_the_demo_model_is_kept_as_it_is_stored(tmp_path: Path) -> None:
    """Q4_1 layers and a Q8_0 table: the hidden states have the bits of the bfloat16 import."""
    kept = imported(demo_gguf(), tmp_path, "keep")
    plain = imported(demo_gguf(), tmp_path, "bfloat16")
    stored = {tensor.name: tensor for tensor in GGUFReader(demo_gguf()).tensors}
    with safe_open(kept / "model.safetensors", "pt") as file:
        blocks = file.get_tensor("model.layers.3.mlp.up_proj.weight.Q4_1")
    assert torch.equal(blocks, torch.from_numpy(stored["blk.3.ffn_up.weight"].data.copy()))
    ops = select("cpu")
    models = [
        load_model(ModelPlan.read(folder, "demo", torch.bfloat16, 64), ops)
        for folder in (kept, plain)
    ]
    prompt = list(range(100, 130))
    kept_answer, plain_answer = (
        PagedModel(model, ops).generate(Stream(), prompt, 8) for model in models
    )
    assert kept_answer == plain_answer
    table = models[0].plan.spec.vocab_size * models[0].plan.spec.hidden_size * 2
    linears = [model.num_bytes - table for model in models]
    assert linears[0] < 0.37 * linears[1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (torch.zeros(64, 70, dtype=torch.uint8), r"has shape \(64, 70\), .* says \(64, 68\)"),
        (torch.zeros(64, 68, dtype=torch.int8), "is I8; allowed: U8"),
    ],
)
def test_damaged_blocks_are_refused_by_name(
    tmp_path: Path, changed: torch.Tensor, words: str
) -> None:
    folder = imported(make_model(tmp_path / "model", "llama", **SIZES), tmp_path, "int8")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight.Q8_0"] = changed
    save_file(tensors, tmp_path / "model.safetensors")
    plan = ModelPlan.read(folder, "tiny", torch.bfloat16)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=words):
        checkpoint.check(plan.spec)


def test_blocks_read_as_rows(tmp_path: Path) -> None:
    folder = imported(make_model(tmp_path / "model", "llama", **SIZES), tmp_path, "int8")
    with Checkpoint(folder) as checkpoint:
        weight = checkpoint.get("model.layers.0.mlp.up_proj.weight")
        assert isinstance(weight, BlockMatrix) and weight.shape == (96, 64)
        assert torch.equal(weight[3:5].dequantize(), weight.dequantize()[3:5])
