from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.manifest import BaseModelShape
from tests.doubles import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="session")
def base(model: Path) -> BaseModelShape:
    return BaseModelShape.from_config(json.loads((model / "config.json").read_text()), "b" * 64)
