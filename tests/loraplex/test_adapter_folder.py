"""Folders as training tools leave them: checked before anything is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import peft.utils.constants
import pytest
import torch
from safetensors.torch import load_file

from adapters.format.other_files import SILENT
from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from loraplex.adapter_folder import USED, check_folder, find_adapter, name_others
from loraplex.errors import ApiFailure, Refused
from tests.adapters.files import CONFIG, write_adapter
from tests.workers.importer.test_folder_walk import written_files

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 7\n"


def set_age(file: Path, seconds: int) -> None:
    written = 1_700_000_000 - seconds
    os.utime(file, (written, written))


def leave(*names: str) -> Callable[[Path], None]:
    """Leaves only files of these names in the folder, empty where they are new."""

    def change(folder: Path) -> None:
        for file in folder.iterdir():
            if file.name not in names:
                file.unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()

    return change


def put(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def configure(**changes: object) -> Callable[[Path], None]:
    return put(CONFIG_NAME, json.dumps(CONFIG | changes).encode())


def add_newer(name: str) -> Callable[[Path], None]:
    """Puts an empty file there that is a second newer than the weights."""

    def change(folder: Path) -> None:
        (folder / name).touch()
        set_age(folder / name, 10)
        set_age(folder / WEIGHTS_NAME, 11)

    return change


KINDS: dict[str, tuple[Callable[[Path], None], type[ApiFailure], str]] = {
    "newer .bin": (add_newer("adapter_model.bin"), ApiFailure, "cannot be known: delete the one"),
    "newer .pt": (add_newer("adapter_model.pt"), ApiFailure, "adapter_model.pt is newer than"),
    ".bin alone": (leave(CONFIG_NAME, "adapter_model.bin"), ApiFailure, "weights_only=True"),
    ".pt alone": (leave(CONFIG_NAME, "adapter_model.pt"), ApiFailure, "a pickle, which is never"),
    "LFS pointer to weights": (put(WEIGHTS_NAME, POINTER), Refused, "adapter.file.git_lfs"),
    "LFS pointer to config": (put(CONFIG_NAME, POINTER), Refused, "run git lfs pull"),
    "checkpoints": (
        leave(f"checkpoint-900/{CONFIG_NAME}", f"checkpoint-1000/{CONFIG_NAME}", "trainer.log"),
        ApiFailure,
        "only 2 checkpoint.*checkpoint-1000 --name bot",
    ),
    "one checkpoint": (leave(f"checkpoint-5/{CONFIG_NAME}"), ApiFailure, "only 1 checkpoint"),
    "several adapters in folders": (
        leave(f"a/{CONFIG_NAME}", f"b/{CONFIG_NAME}", f"checkpoint-7/{CONFIG_NAME}"),
        ApiFailure,
        "only adapters in folders: push .*bot/a, .*bot/b$",
    ),
    "prefix tuning": (configure(peft_type="PREFIX_TUNING"), Refused, "prefix tuning"),
    "prompt tuning": (configure(peft_type="PROMPT_TUNING"), Refused, "prompt *\n? *tuning"),
    "GGUF alone": (leave("adapter-f16.gguf"), ApiFailure, "has a GGUF file"),
    "GGUF renamed": (
        put(WEIGHTS_NAME, b"GGUF\3\0\0\0" + bytes(24)),
        Refused,
        "adapter.unsupported.gguf",
    ),
    "whole model": (leave("config.json", "model.safetensors"), ApiFailure, "loraplex model add"),
    "whole model, sharded": (
        leave("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"),
        ApiFailure,
        "has a whole model",
    ),
    "truncated": (put(WEIGHTS_NAME, b"\0" * 7), Refused, "adapter.file.truncated"),
    "no configuration": (leave(WEIGHTS_NAME), ApiFailure, f"has no {CONFIG_NAME}"),
    "no weights": (leave(CONFIG_NAME), ApiFailure, f"has no {WEIGHTS_NAME}"),
    "nothing": (leave(), ApiFailure, f"has no {CONFIG_NAME}"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "bot")
    return tmp_path / "bot"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_refused_for_what_it_is(kind: str, folder: Path) -> None:
    change, error, message = KINDS[kind]
    change(folder)
    warnings: list[str] = []
    with pytest.raises(error, match=message):
        check_folder(folder, warnings.append)
    assert warnings == []


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
@pytest.mark.parametrize("seconds", [0, 5])
def test_an_older_pickle_is_warned_about(name: str, seconds: int, folder: Path) -> None:
    (folder / name).touch()
    set_age(folder / name, seconds)
    set_age(folder / WEIGHTS_NAME, 0)
    warnings: list[str] = []
    check_folder(folder, warnings.append)
    (warning,) = warnings
    assert f"{name} is ignored" in warning


def test_other_files_are_no_matter(folder: Path) -> None:
    for name in ("config.json", "README.md", "adapters.safetensors", "model.gguf"):
        (folder / name).touch()
    warnings: list[str] = []
    check_folder(folder, warnings.append)
    assert warnings == []


@pytest.mark.parametrize("inner", ["german", "checkpoint-12"])
def test_the_only_adapter_one_folder_deeper_is_taken(inner: str, folder: Path) -> None:
    write_adapter(folder.parent / "outer" / inner)
    lines: list[str] = []
    assert find_adapter(folder.parent / "outer", lines.append) == folder.parent / "outer" / inner
    assert inner in lines[0]
    assert find_adapter(folder, lines.append) == folder
    write_adapter(folder.parent / "outer" / "second")
    assert find_adapter(folder.parent / "outer", lines.append) == folder.parent / "outer"
    assert len(lines) == 1


TRAINERS = {
    *("trainable_params.bin", "non_lora_trainables.bin", "new_embeddings.safetensors"),
    *("trainable_params.pt", "value_head.bin", "pytorch_model.bin", "model.safetensors"),
    *("mm_projector.bin", "adapter_model.gguf", "0000100_adapters.safetensors", "vocab.json"),
    *("args.json", "config.json", "dataset_info.json"),
}
"""Files that trainers write beside an adapter: LongLoRA, LLaVA, TRL, MLX, ms-swift and others."""
PEFT = {
    value
    for name, value in vars(peft.utils.constants).items()
    if name.endswith("_NAME") and isinstance(value, str) and not name.startswith("DUMMY")
}


@pytest.mark.parametrize("name", sorted({*written_files(), *PEFT, *TRAINERS}))
def test_every_file_of_a_folder_is_used_named_or_silent(name: str, folder: Path) -> None:
    (folder / name).touch()
    named = " ".join(name_others(folder))
    is_silent = any(fnmatchcase(name, pattern) for pattern in SILENT)
    assert (name in named) != (name in USED or is_silent)
    if name in TRAINERS:
        assert name in named


def test_weights_that_are_not_used_have_a_sentence_of_their_own(folder: Path) -> None:
    for name in ("trainable_params.bin", "new_embeddings.safetensors", "args.json", "optimizer.pt"):
        (folder / name).touch()
    weights, others = name_others(folder)
    assert weights.endswith("may be in it: new_embeddings.safetensors, trainable_params.bin")
    assert others == "not used: args.json"


def test_the_two_lines_convert_a_pickle(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(ApiFailure) as caught:
        check_folder(folder, print)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert len(lines) == 2
    exec("\n".join(lines), {})
    set_age(folder / "adapter_model.bin", 0)
    converted = load_file(folder / WEIGHTS_NAME)
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensors[name]) for name in tensors)
    check_folder(folder, lambda _warning: None)
