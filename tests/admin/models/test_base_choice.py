"""Which base model an adapter is for, by what its configuration says it was trained on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.format.validator import CONFIG_NAME
from admin.models.base_choice import quantisation_warning, read_trained_on, source_of
from store.records import BaseModel
from tests.adapters.files import BASE, write_adapter
from tests.admin.conftest import Plane, write_model
from tests.admin.http.test_routes import problem
from tests.admin.uploads.test_upload import push

REPOSITORY = "models--meta-llama--Llama-3.1-8B-Instruct"


@pytest.fixture
async def acme(plane: Plane) -> httpx.AsyncClient:
    return await plane.tenant("acme")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


async def register(plane: Plane, name: str, digit: str, source: str = "", **changes: int) -> None:
    if not (plane.store / "models" / (digit * 64)).exists():
        write_model(plane.store, digit * 64, **changes)
    body = {"name": name, "digest": digit * 64, "source": source}
    made = await plane.client.post("models", json=body)
    assert made.status_code == 201 and made.json()["source"] == source, made.text


def trained_on(folder: Path, name: Any) -> Path:
    config = json.loads((folder / CONFIG_NAME).read_text()) | {"base_model_name_or_path": name}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    return folder


def test_the_name_of_a_source() -> None:
    for path in (
        f"/root/.cache/huggingface/hub/{REPOSITORY}/snapshots/0e9e39f249a16976918f6564b8830bc894c89659",
        "/models/Llama-3.1-8B-Instruct",
        "/models/Llama-3.1-8B-Instruct/",
    ):
        assert source_of(Path(path)) == "Llama-3.1-8B-Instruct"
    assert source_of(Path("/models/llama.gguf")) == "llama.gguf"


CHOICES: list[tuple[Any, str | None]] = [
    ("llama", "llama"),
    ("meta-llama/Llama-3.1-8B-Instruct", "instruct"),
    ("unsloth/llama-3.1-8b-instruct", "instruct"),
    ("/data/models/Llama-3.1-8B-Instruct/", "instruct"),
    (f"/root/.cache/hub/{REPOSITORY}/snapshots/0e9e39f2", "instruct"),
    ("meta-llama/Llama-3.1-8B", "llama"),
    ("unsloth/llama-3.1-8b-instruct-unsloth-bnb-4bit", "instruct"),
    ("hugging-quants/Llama-3.1-8B-Instruct-GPTQ-INT4", "instruct"),
    ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", None),
    ("somebody/else", None),
    ("", None),
    (None, None),
    (["meta-llama/Llama-3.1-8B"], None),
]
"""What a configuration names, and the base model that it means; None: none that is registered."""


async def test_a_configuration_decides_between_bases_of_one_shape(
    plane: Plane, acme: httpx.AsyncClient, folder: Path
) -> None:
    await register(plane, "llama", "c", "Llama-3.1-8B")
    await register(plane, "instruct", "d", "Llama-3.1-8B-Instruct")
    for number, (name, chosen) in enumerate(CHOICES):
        answer = await push(acme, trained_on(folder, name), name=f"bot-{number}")
        if chosen is not None:
            assert answer.status_code == 201, (name, answer.text)
            assert answer.json()["model"] == chosen, name
            continue
        refused = problem(answer, 400)
        assert refused["code"] == "adapter.base.ambiguous", name
        assert refused["allowed"] == ["instruct", "llama"]
        assert "--model instruct" in refused["hint"] and "instruct, llama" in refused["hint"]
    assert (await push(acme, folder, name="bot", model="llama")).json()["model"] == "llama"


async def test_two_names_of_one_model_are_not_chosen_between(
    plane: Plane, acme: httpx.AsyncClient, folder: Path
) -> None:
    await register(plane, "llama", "c", "Llama-3.1-8B")
    await register(plane, "llama-latest", "c", "Llama-3.1-8B")
    for name in ("somebody/else", "meta-llama/Llama-3.1-8B"):
        refused = problem(await push(acme, trained_on(folder, name), name="bot"), 400)
        assert refused["code"] == "adapter.base.ambiguous"
        assert refused["allowed"] == ["llama", "llama-latest"]
    by_name = await push(acme, trained_on(folder, "llama-latest"), name="bot")
    assert by_name.json()["model"] == "llama-latest"


async def test_a_base_that_is_named_and_does_not_fit(
    plane: Plane, acme: httpx.AsyncClient, folder: Path
) -> None:
    await register(plane, "small", "c")
    await register(plane, "large", "d", num_hidden_layers=1, intermediate_size=128, hidden_size=32)
    refused = problem(await push(acme, trained_on(folder, "x/large"), name="bot"), 400)
    assert refused["code"] == "adapter.base.mismatch" and "--model small" in refused["hint"]
    assert (await push(acme, folder, name="bot", model="small")).status_code == 201


async def test_a_quantised_model_is_warned_about(
    plane: Plane, acme: httpx.AsyncClient, folder: Path
) -> None:
    await register(plane, "llama", "c", "Llama-3.1-8B")
    for name, is_warned in (
        ("unsloth/Llama-3.1-8B-bnb-4bit", True),
        ("other/model-AWQ", True),
        ("meta-llama/Llama-3.1-8B", False),
    ):
        made = (await push(acme, trained_on(folder, name), name="bot")).json()
        assert any("a quantised model" in each for each in made["warnings"]) is is_warned


def test_which_names_are_of_quantised_models() -> None:
    base = BaseModel("llama", BASE.digest, BASE, 512, datetime.now(UTC), source="Llama-bnb-4bit")
    quantised = [
        *("m-4bit", "m-8bit", "m-bnb-4bit", "m-unsloth-bnb-4bit", "m-GPTQ", "m-GPTQ-Int4", "m-AWQ"),
        *("m-FP8", "m-FP8-dynamic", "m-w8a8", "m-quantized.w4a16", "m-hqq-4bit", "m-GGUF", "m-NF4"),
    ]
    for name in quantised:
        assert quantisation_warning(f"x/{name}", base), name
    for name in ("Llama-3.1-8B", "Qwen2.5-0.5B-Instruct", "m-fp32", "gemma-3-4b-it", "bitnet"):
        assert quantisation_warning(f"x/{name}", base) is None, name
    assert quantisation_warning("x/Llama-bnb-4bit", base) is None


def test_configurations_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / CONFIG_NAME
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"base_model_name_or_path": 7}'):
        file.write_bytes(content)
        assert read_trained_on(file) == ""
    file.write_bytes(b'{"base_model_name_or_path": "%s"}' % (b"x" * 1025))
    assert read_trained_on(file) == ""
