"""Versions with known holes are never installed."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

FLOORS = [
    ("multipart", "1.3.1", "CVE-2026-28356"),
    ("litestar", "2.20.0", "CVE-2026-25479"),
    ("jinja2", "3.1.6", "CVE-2025-27516"),
    ("h11", "0.16.0", "CVE-2025-43859"),
    ("requests", "2.32.4", "CVE-2024-47081"),
    ("urllib3", "2.6.3", "CVE-2026-21441"),
    ("idna", "3.7", "CVE-2024-3651"),
    ("certifi", "2024.7.4", "CVE-2024-39689"),
    ("torch", "2.6.0", "CVE-2025-32434"),
]
"""The first version without the hole, and the advisory."""


@pytest.mark.parametrize(("package", "fixed", "advisory"), FLOORS)
def test_the_floor_is_above_the_advisory(package: str, fixed: str, advisory: str) -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    found = [needed for text in listed if (needed := Requirement(text)).name == package]
    floors = [Version(each.version) for each in found[0].specifier if each.operator in (">=", "==")]
    assert max(floors) >= Version(fixed), f"{package} has {advisory}"
    assert Version(version(package)) >= Version(fixed)
