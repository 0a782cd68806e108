"""Which format `serve` imports a model in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.box.importing import Formats, import_model
from loraplex.box.weight_format import serving_format
from loraplex.settings import Settings
from tests.e2e.demo import gguf


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("model.gguf", {}, "keep"),
        ("folder", {}, "bfloat16"),
        ("model.gguf", {"kernel_variant": "avx512"}, "bfloat16"),
        ("model.gguf", {"kernel_variant": "avx2"}, "bfloat16"),
        ("model.gguf", {"dtype": "float32"}, "bfloat16"),
        ("model.gguf", {"ops": "reference"}, "bfloat16"),
        ("model.gguf", {"device": "cuda"}, "bfloat16"),
    ],
)
def test_a_gguf_file_keeps_its_format_where_that_is_faster(
    tmp_path: Path, name: str, fields: dict[str, Any], expected: str
):
    source = tmp_path / name
    source.touch()
    wanted: dict[str, Any] = {"device": "cpu", "kernel_variant": "avx512bf16"} | fields
    assert serving_format(source, Settings(data_dir=tmp_path, **wanted), None) == Formats(expected)


def test_a_model_that_is_served_keeps_its_format(tmp_path: Path):
    settings = Settings(data_dir=tmp_path / "data", device="cpu", kernel_variant="avx512bf16")
    choices = [Formats(), Formats("int4"), Formats("int4", "bfloat16")]
    digests = [import_model(gguf(), settings, lambda *_: None, each) for each in choices]
    assert len(set(digests)) == 3
    for formats, digest in zip(choices, digests, strict=True):
        assert serving_format(gguf(), settings, digest) == formats
    assert serving_format(gguf(), settings, "0" * 64) == Formats("keep")
