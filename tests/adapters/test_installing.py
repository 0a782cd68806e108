"""Commands that install an optional part name this environment and what pyproject.toml asks for."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from adapters.installing import install_command

DECLARED = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("extra", ["s3", "gs", "transformers", "worker", "serve"])
def test_the_command_installs_what_the_extra_declares(extra: str) -> None:
    python, *command = shlex.split(install_command(extra))
    assert python == sys.executable and command[:3] == ["-m", "pip", "install"]
    expected = [each for each in DECLARED[extra] if not each.startswith("loraplex")]
    expected += DECLARED["worker"] if extra == "serve" else []
    names = [requirement.partition(">")[0].partition("<")[0] for requirement in command[3:]]
    assert sorted(names) == sorted(each.partition(">")[0] for each in expected)
    assert not any("loraplex" in requirement for requirement in command[3:])
