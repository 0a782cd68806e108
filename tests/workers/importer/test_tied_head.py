"""Whether the output matrix is tied is decided by the weights, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.store.folder import LocalStore
from ops.registry import select
from tests.doubles import make_model
from tests.workers.importer.test_quantized_checkpoints import Change, source_of
from tests.workers.models.test_models import TOLERANCE, draw_tokens, oracle_logits
from tests.workers.paged import PagedModel, Stream
from workers.importer import import_model
from workers.importer.weight_formats import ImportFormat
from workers.models.checkpoint import CheckpointError
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edit_weights(folder: Path, tensors: dict[str, Tensor | None], shard: str = "") -> None:
    """Adds or removes tensors, in a second shard if `shard` is its name."""
    path = folder / "model.safetensors"
    kept = {name: each for name, each in load_file(path).items() if name not in tensors}
    added = {name: each for name, each in tensors.items() if each is not None}
    if not shard:
        save_file(kept | added, path, {"format": "pt"})
        return
    save_file(kept, path.with_name("a.safetensors"), {"format": "pt"})
    save_file(added, folder / shard, {"format": "pt"})
    path.unlink()
    files = dict.fromkeys(kept, "a.safetensors") | dict.fromkeys(added, shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def imported(source: Path, tmp_path: Path, form: ImportFormat = "bfloat16") -> ModelPlan:
    store = LocalStore(tmp_path / "store")
    digest = import_model(source, store, weight_format=form)
    return ModelPlan.read(store.model_folder(digest), digest, torch.float32)


def assert_equal_to_transformers(source: Path, plan: ModelPlan) -> None:
    ops, tokens = select("cpu"), draw_tokens(1, 12)
    ((rows),) = PagedModel(load_model(plan, ops), ops).step([(Stream(), tokens)])
    expected = oracle_logits(source, tokens)
    torch.testing.assert_close(rows, expected[-len(rows) :], atol=TOLERANCE, rtol=1e-4)


def other_head(source: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    table = load_file(source / "model.safetensors")[EMBEDDING]
    return (table.flip(0) * 0.7).to(dtype).contiguous()


@pytest.mark.parametrize("shard", ["", "b.safetensors"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "glm4", "cohere2"])
def test_a_head_that_differs_is_used(family: str, shard: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", family, tie_word_embeddings=True)
    edit_weights(source, {HEAD: other_head(source)}, shard)
    plan = imported(source, tmp_path)
    assert not plan.spec.tie_word_embeddings and not plan.shape.tie_word_embeddings
    assert_equal_to_transformers(source, plan)


def test_a_head_of_another_dtype_is_used(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "llama", tie_word_embeddings=True)
    edit_weights(source, {HEAD: other_head(source, torch.float16)})
    plan = imported(source, tmp_path)
    assert not plan.spec.tie_word_embeddings
    assert_equal_to_transformers(source, plan)


@pytest.mark.parametrize("family", ["llama", "cohere2"])
def test_an_equal_head_stays_tied(family: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", family, tie_word_embeddings=True)
    table = load_file(source / "model.safetensors")[EMBEDDING]
    edit_weights(source, {HEAD: table.clone()})
    for form in ("bfloat16", "int8"):
        plan = imported(source, tmp_path, form)
        assert plan.spec.tie_word_embeddings and plan.shape.tie_word_embeddings
    assert_equal_to_transformers(source, imported(source, tmp_path))


@pytest.mark.parametrize("family", ["llama", "glm4", "cohere2"])
def test_a_head_without_an_embedding_is_both(family: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", family, tie_word_embeddings=True)
    edit_weights(source, {EMBEDDING: None, HEAD: other_head(source)})
    plan = imported(source, tmp_path)
    assert plan.spec.tie_word_embeddings
    assert_equal_to_transformers(source, plan)


def test_a_missing_head_that_is_not_tied_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """transformers draws it at random."""
    source = make_model(tmp_path / "source", "llama", tie_word_embeddings=False)
    edit_weights(source, {HEAD: None})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
        imported(source, tmp_path)


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-w8", "bitsandbytes-nf4"])
def test_a_head_of_a_quantised_checkpoint_is_used_unless_it_equals(
    checkpoint: str, tmp_path: Path
) -> None:
    heads: list[Tensor] = []

    def add(factor: float) -> Change:
        def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
            tensors[HEAD] = tensors[EMBEDDING] * factor
            heads.append(tensors[HEAD])

        return change

    source = source_of(checkpoint, tmp_path / "other", add(0.5))
    assert json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    store = LocalStore(tmp_path / "store")
    folder = store.model_folder(import_model(source, store))
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    stored = load_file(folder / "model.safetensors")[HEAD]
    assert torch.equal(stored, heads[0].bfloat16())
    equal = import_model(source_of(checkpoint, tmp_path / "equal", add(1.0)), store)
    assert equal == import_model(source_of(checkpoint, tmp_path / "plain"), store)
