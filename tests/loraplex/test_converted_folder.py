"""Folders whose weights are in several files, or as MLX writes them, become peft's two files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles
from loraplex.adapter_folder import check_folder
from loraplex.converted_folder import INDEX_NAME, MLX_NAME, converted
from loraplex.errors import ApiFailure, Refused
from tests.adapters.files import BASE, validate, write_adapter

RANK, SCALE = 4, 20.0
LAYERS = (1,)
MLX_CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": RANK, "dropout": 0.0, "scale": SCALE},
    "model": "mlx-community/tiny-4bit",
    "num_layers": 1,
}
"""As mlx_lm.lora writes it: the last layers alone are trained."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "bot")
    return tmp_path / "bot"


def write_mlx(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Returns the tensors under MLX's names, each factor transposed to peft's."""
    for file in folder.iterdir():
        file.unlink()
    torch.manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    for layer in LAYERS:
        for projection in ("q_proj", "v_proj"):
            rows, columns = BASE.projection_shape(layer, projection)
            path = BASE.module_path(layer, projection)
            tensors[f"{path}.lora_a"] = torch.randn(rows, RANK).to(dtype)
            tensors[f"{path}.lora_b"] = torch.randn(RANK, columns).to(dtype)
    save_file(tensors, folder / MLX_NAME)
    add_null_metadata(folder / MLX_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(MLX_CONFIG | changes))
    return tensors


def add_null_metadata(file: Path) -> None:
    """MLX writes null where a file has none."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps({"__metadata__": None} | json.loads(raw[8 : 8 + length])).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def shard(folder: Path) -> dict[str, torch.Tensor]:
    """Parts the folder's weights into two files."""
    tensors = load_file(folder / WEIGHTS_NAME)
    (folder / WEIGHTS_NAME).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return tensors


def test_a_folder_of_peft_is_left_as_it_is(folder: Path) -> None:
    said: list[str] = []
    with converted(folder, said.append) as sent:
        assert sent == folder and not said


def test_several_files_become_one(folder: Path) -> None:
    tensors = shard(folder)
    said: list[str] = []
    with converted(folder, said.append) as sent:
        joined = load_file(sent / WEIGHTS_NAME)
        check_folder(sent, print)
        assert validate(AdapterFiles.in_folder(sent), BASE).max_rank == 4
    assert joined.keys() == tensors.keys()
    assert all(torch.equal(joined[name], tensors[name]) for name in tensors)
    assert "in several files" in said[0] and not sent.exists()


def test_an_mlx_folder_may_have_factors_of_the_output_matrix(folder: Path) -> None:
    tensors = write_mlx(folder)
    head = {"lm_head.lora_a": torch.randn(64, RANK), "lm_head.lora_b": torch.randn(RANK, 320)}
    save_file(tensors | head, folder / MLX_NAME)
    with converted(folder, print) as sent:
        manifest = validate(AdapterFiles.in_folder(sent), BASE)
    assert manifest.projections == ("q_proj", "v_proj", "lm_head")
    assert manifest.layers == LAYERS and not manifest.warnings


def test_factors_of_the_embedding_of_mlx_are_refused_by_name(folder: Path) -> None:
    table = {"model.embed_tokens.lora_a": torch.ones(320, 4)}
    save_file(write_mlx(folder) | table, folder / MLX_NAME)
    with pytest.raises(ApiFailure, match="Leave embed_tokens out"), converted(folder, print):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_mlx_folder_computes_the_same_as_peft(folder: Path, dtype: torch.dtype) -> None:
    tensors = write_mlx(folder, dtype)
    said: list[str] = []
    with converted(folder, said.append) as sent:
        check_folder(sent, print)
        manifest = validate(AdapterFiles.in_folder(sent), BASE)
        factors, config = load_file(sent / WEIGHTS_NAME), LoraConfig.from_pretrained(str(sent))
        written = json.loads((sent / CONFIG_NAME).read_text())
    assert manifest.layers == LAYERS and manifest.projections == ("q_proj", "v_proj")
    assert not manifest.warnings and "MLX" in said[0]
    assert written["base_model_name_or_path"] == MLX_CONFIG["model"]
    assert len(factors) == len(tensors)
    for name, a in tensors.items():
        if name.endswith(".lora_b"):
            continue
        path = name.removesuffix(".lora_a")
        b = tensors[f"{path}.lora_b"]
        wanted = SCALE * (a.double() @ b.double()).T
        ours = [factors[f"base_model.model.{path}.lora_{each}.weight"] for each in "BA"]
        assert ours[0].dtype == dtype
        found = config.lora_alpha / config.r * (ours[0].double() @ ours[1].double())
        assert np.allclose(found.numpy(), wanted.numpy(), rtol=1e-12)


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


WRONG: dict[str, tuple[Callable[[Path], Any], type[ApiFailure], str]] = {
    "DoRA": (lambda folder: write_mlx(folder, fine_tune_type="dora"), ApiFailure, "type 'dora'"),
    "full": (lambda folder: write_mlx(folder, fine_tune_type="full"), ApiFailure, "type 'full'"),
    "no parameters": (
        lambda folder: write_mlx(folder, lora_parameters=None),
        ApiFailure,
        "lacks lora_parameters",
    ),
    "no configuration": (
        lambda folder: (write_mlx(folder), (folder / CONFIG_NAME).unlink()),
        ApiFailure,
        "lacks lora_parameters",
    ),
    "no JSON": (
        lambda folder: (write_mlx(folder), put(CONFIG_NAME, b"{")(folder)),
        ApiFailure,
        "is not JSON",
    ),
    "other tensors": (
        lambda folder: (
            write_mlx(folder),
            save_file({"model.embed.weight": torch.ones(2, 2)}, folder / MLX_NAME),
        ),
        ApiFailure,
        "no factor of a LoRA",
    ),
    "Git LFS": (
        lambda folder: (write_mlx(folder), put(MLX_NAME, b"version https://git-lfs")(folder)),
        Refused,
        r"adapter\.file\.git_lfs",
    ),
    "a shard is missing": (
        lambda folder: (shard(folder), next(folder.glob("*00002-of*")).unlink()),
        ApiFailure,
        "is not in the folder",
    ),
    "a shard elsewhere": (
        lambda folder: (
            shard(folder),
            put(INDEX_NAME, b'{"weight_map": {"a": "../x.safetensors"}}')(folder),
        ),
        ApiFailure,
        "is not in the folder",
    ),
    "no map": (
        lambda folder: (shard(folder), put(INDEX_NAME, b'{"weight_map": [1]}')(folder)),
        ApiFailure,
        "has no weight_map",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_converted_is_named(kind: str, folder: Path) -> None:
    change, error, words = WRONG[kind]
    change(folder)
    with pytest.raises(error, match=words), converted(folder, print):
        pass


def test_a_scale_that_is_no_whole_number(folder: Path) -> None:
    write_mlx(folder, lora_parameters={"rank": 3, "scale": 0.1})
    with converted(folder, print) as sent:
        config = json.loads((sent / CONFIG_NAME).read_text())
    assert math.isclose(config["lora_alpha"] / config["r"], 0.1)
