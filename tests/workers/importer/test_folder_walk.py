"""Every file and every field of a model's folder is used, refused or named.

The files and the fields are taken from the constants and classes of transformers and accelerate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import accelerate.utils.constants
import pytest
import transformers.tokenization_utils_base
import transformers.tokenization_utils_tokenizers
import transformers.trainer
import transformers.utils
import transformers.utils.hub

from adapters.format.generation_fields import GENERATION_FIELDS, name_generation_fields
from adapters.format.other_files import SILENT, TRAINING_STATE
from adapters.store.folder import LocalStore
from tests.doubles import FAMILIES, LAID_OUT_ANEW, make_model
from workers.importer import ImportRefused, import_model
from workers.importer.folder_check import USED
from workers.importer.unused_fields import SILENT_FIELDS, name_config_fields
from workers.models import FAMILIES as READERS
from workers.models import read_spec
from workers.models.spec import ModelSpec, UnsupportedModel

MODULES = (
    *(transformers.utils, transformers.utils.hub, transformers.trainer),
    *(transformers.tokenization_utils_base, transformers.tokenization_utils_tokenizers),
    accelerate.utils.constants,
)
OTHERS = {
    *("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tf_model.h5"),
    *("flax_model.msgpack", "pytorch_model.bin", "consolidated.safetensors", "params.json"),
    *("config_sentence_transformers.json", "sentence_bert_config.json", "configuration_x.py"),
    *("custom_generate", "original", "new_embeddings.safetensors"),
    *("trainable_params.bin", "model.fp16.safetensors", "quantize_config.json", "x.gguf"),
}
"""Files and folders whose names are in no constant of these modules."""


def written_files() -> Iterator[str]:
    """Yields the names of files in the constants of transformers and accelerate."""
    for module in MODULES:
        for constant, value in vars(module).items():
            is_name = constant.isupper() and constant.endswith(("_NAME", "_FILE", "_DIR"))
            if is_name and isinstance(value, str) and "/" not in value and "{" not in value:
                yield value


FILES = sorted({*written_files(), *OTHERS})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source") / "m", "qwen3")


def imported(source: Path, tmp_path: Path) -> list[str]:
    notes: list[str] = []
    import_model(source, LocalStore(tmp_path), note=notes.append)
    return notes


def test_the_constants_are_found() -> None:
    expected = {
        "config.json",
        "optimizer.pt",
        "special_tokens_map.json",
        "preprocessor_config.json",
    }
    assert expected <= {*FILES}


def test_a_plain_folder_is_imported_without_a_word(source: Path, tmp_path: Path) -> None:
    assert imported(source, tmp_path) == []


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_used_refused_or_named(name: str, source: Path, tmp_path: Path) -> None:
    is_there = (source / name).exists()
    if not is_there:
        (source / name).write_text("{}")
    try:
        notes = " ".join(imported(source, tmp_path))
    except ImportRefused as refused:
        assert name in str(refused)
        return
    finally:
        if not is_there:
            (source / name).unlink()
    is_silent = any(fnmatchcase(name, pattern) for pattern in SILENT)
    assert (name in notes) != (name in USED or is_silent)


@pytest.mark.parametrize(
    "name",
    sorted({*USED, *OTHERS, "adapter_config.json", "processor_config.json"}),
)
def test_nothing_that_describes_a_model_is_silent(name: str) -> None:
    assert not any(fnmatchcase(name, pattern) for pattern in SILENT)
    for optimizer in ("optimizer.pt", "trainer_state.json", "rng_state_0.pth", "training_args.bin"):
        assert any(fnmatchcase(optimizer, pattern) for pattern in TRAINING_STATE)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "qwen3")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ImportRefused, match=r"adapter beside its weights"):
        imported(source, tmp_path)


@pytest.mark.parametrize("kind", ["Dense", "WeightedLayerPooling", "LayerNorm"])
def test_a_module_that_is_not_computed_is_refused(kind: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "qwen3")
    kinds = ["Transformer", "Pooling", kind, "Normalize"]
    modules = [{"idx": n, "type": f"sentence_transformers.models.{k}"} for n, k in enumerate(kinds)]
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ImportRefused, match=kind):
        imported(source, tmp_path)
    (source / "modules.json").write_text(json.dumps([m for m in modules if kind not in m["type"]]))
    imported(source, tmp_path)


def test_special_tokens_of_older_versions_are_used(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "qwen3")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config = {name: value for name, value in config.items() if name != "added_tokens_decoder"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "special_tokens_map.json").write_text('{"eos_token": {"content": "<end>"}}')
    store = LocalStore(tmp_path)
    folder = store.model_folder(import_model(source, store))
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    assert stored["eos_token"] == {"content": "<end>"}


@pytest.mark.parametrize("family", READERS)
def test_every_field_of_a_config_is_used_refused_or_named(family: str) -> None:
    """A field is used if some value of it changes the spec or is refused."""
    config = transformers.CONFIG_MAPPING[family]().to_dict()
    spec = read_spec(config)
    for name in config:
        is_used = any(is_read(config, name, spec, value) for value in (True, 7, "other", [1], None))
        if not (is_used or name in SILENT_FIELDS or name.startswith("_")):
            assert name in name_config_fields(config | {name: "other"})[0]


def is_read(config: dict[str, Any], name: str, spec: ModelSpec, value: object) -> bool:
    try:
        return read_spec(config | {name: value}) != spec
    except (UnsupportedModel, TypeError, ValueError, KeyError, AttributeError):
        return True


def test_an_unknown_field_is_named() -> None:
    config = transformers.CONFIG_MAPPING["llama"]().to_dict() | {"new_scale": 2.0, "off": False}
    assert name_config_fields(config) == ["not used of config.json: new_scale"]


@pytest.mark.parametrize("family", [*FAMILIES, *LAID_OUT_ANEW])
def test_configs_of_transformers_have_no_field_to_name(family: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", family)
    config = json.loads((source / "config.json").read_text())
    assert name_config_fields(config) == []


def test_every_generation_field_is_used_or_named() -> None:
    plain: dict[str, Any] = transformers.GenerationConfig().to_dict()
    assert name_generation_fields(plain) == []
    for name in plain.keys() - GENERATION_FIELDS:
        if name.startswith("_"):
            continue
        (named,) = name_generation_fields({name: 7})
        assert name in named
