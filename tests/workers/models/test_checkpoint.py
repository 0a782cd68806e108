"""Loading weights: shards, progress, and files that do not fit their config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.registry import select
from tests.doubles import make_model
from tests.workers.paged import PagedModel, Stream
from workers.models.checkpoint import CheckpointError
from workers.models.loading import load_model
from workers.models.plan import ModelPlan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen2")


def load(folder: Path) -> PagedModel:
    ops = select("reference")
    return PagedModel(load_model(ModelPlan.read(folder, "tiny", torch.float32), ops), ops)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def test_shards_load_as_one_file_does(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = folder.with_name("sharded")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    logits = [load(path).step([(Stream(), [1, 2, 3])])[0] for path in (folder, sharded)]
    torch.testing.assert_close(logits[0], logits[1], atol=0, rtol=0)


def test_two_names_of_one_tensor_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, **{"embed_tokens.weight": tensors["model.embed_tokens.weight"]})
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight and \S+embed_tokens.weight are one"
    ):
        load(folder)


def test_progress_ends_at_the_total(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        ModelPlan.read(folder, "tiny", torch.bfloat16),
        select("reference"),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.1.mlp.up_proj.weight", None),
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(3, 64)),
        ("model.layers.0.self_attn.o_proj.bias", torch.zeros(64)),
    ],
    ids=["missing", "misshapen", "stray"],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, name: str, tensor: torch.Tensor | None
) -> None:
    rewrite(folder, **{name: tensor})
    with pytest.raises(CheckpointError, match=name):
        load(folder)


def test_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "pytorch_model.bin", "absent.safetensors"]
)
def test_index_may_only_name_shards_beside_it(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=shard.replace(".", r"\.")):
        load(folder)
