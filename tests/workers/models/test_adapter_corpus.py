"""Configurations as training tools write them: each verdict, and what the accepted ones compute,
batched with others, against peft."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import AdapterRejected
from adapters.format.tensor_names import WRAPPERS
from adapters.format.validator import AdapterFiles
from adapters.store.folder import LocalStore
from ops.registry import select
from tests.adapters.files import BASE, encode, entries, validate, write
from tests.doubles import make_model
from tests.workers.models.test_models import TOLERANCE, draw_tokens, oracle_logits
from tests.workers.paged import MAX_SLOTS, PagedModel, Stream
from tools.adapter_corpus_page import PAGE, table
from tools.adapter_corpus_page import entries as corpus_entries
from workers.importer import import_model
from workers.models.loading import load_model
from workers.models.plan import ModelPlan

CORPUS = corpus_entries()
ACCEPTED = [number for number, entry in enumerate(CORPUS) if entry["verdict"] == "accepted"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def write_entry(folder: Path, number: int, copy: np.ndarray) -> AdapterFiles:
    """The configuration with random factors. copy: the base's weight, where the file repeats it."""
    rng = np.random.default_rng(number)
    tensors = {
        name: copy if ".base_layer." in name else rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in CORPUS[number]["tensors"].items()
    }
    return write(folder, CORPUS[number]["config"], encode(*entries(tensors)))


def test_the_corpus_is_large_and_most_of_it_was_written_by_the_tools() -> None:
    written = [entry for entry in CORPUS if not entry["is_documented"]]
    assert len(CORPUS) >= 60 and len(written) >= 30
    assert all(entry["version"] for entry in written)
    assert {entry["tool"] for entry in CORPUS} >= {
        *("peft", "Unsloth", "Axolotl", "LLaMA-Factory", "ms-swift", "TRL", "verl", "MLX"),
        "Tinker",
    }


def test_the_page_has_the_table() -> None:
    """`python -m tools.adapter_corpus_page` writes it."""
    assert table() in PAGE.read_text()


def test_each_verdict(tmp_path: Path) -> None:
    wrong: dict[str, str] = {}
    for number, entry in enumerate(CORPUS):
        files = write_entry(tmp_path / str(number), number, np.zeros((320, 64), np.float32))
        try:
            validate(files, BASE)
            verdict = "accepted"
        except AdapterRejected as rejected:
            verdict = rejected.code
        if verdict != entry["verdict"]:
            wrong[f"{entry['tool']} {entry['version']}, {entry['kind']}"] = verdict
    assert wrong == {}


def as_peft_reads_it(files: AdapterFiles, folder: Path) -> Path:
    """The same adapter without parts of names that peft does not know."""
    folder.mkdir()
    config: dict[str, Any] = json.loads(files.config.read_text())
    for key in ("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"):
        config.pop(key, None)
    (folder / files.config.name).write_text(json.dumps(config))
    tensors = {
        ".".join(part for part in name.split(".") if part not in (*WRAPPERS, "default")): tensor
        for name, tensor in load_file(files.weights).items()
    }
    save_file(tensors, folder / files.weights.name)
    return folder


def test_accepted_ones_batched_with_others_equal_peft(model: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    canonical = tmp_path / "store" / "models" / import_model(model, store)
    ops = select("cpu")
    paged = PagedModel(load_model(ModelPlan.read(canonical, "tiny", torch.float32), ops), ops)
    copy = load_file(model / "model.safetensors")["model.embed_tokens.weight"].numpy()
    for first in range(0, len(ACCEPTED), MAX_SLOTS):
        numbers = ACCEPTED[first : first + MAX_SLOTS]
        paged.unload_adapters()
        work: list[tuple[Stream, list[int]]] = []
        for slot, number in enumerate(numbers):
            files = write_entry(tmp_path / str(number), number, copy)
            paged.load_adapter(slot, files.config.parent)
            work.append((Stream(slot), draw_tokens(number, 9 + slot)))
        for number, (stream, tokens), logits in zip(numbers, work, paged.step(work), strict=True):
            paged.free += stream.pages
            files = AdapterFiles.in_folder(tmp_path / str(number))
            with warnings.catch_warnings():
                # Of an older version of peft than the one that reads its configuration.
                warnings.simplefilter("ignore")
                saved = as_peft_reads_it(files, tmp_path / f"peft-{number}")
                expected = oracle_logits(model, tokens, saved)
            what = f"{CORPUS[number]['tool']} {CORPUS[number]['version']}"
            torch.testing.assert_close(
                logits, expected, atol=TOLERANCE, rtol=1e-4, msg=lambda text, w=what: f"{w}: {text}"
            )
