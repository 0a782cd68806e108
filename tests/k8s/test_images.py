"""What `images/` says, for no test builds an image: confined, pinned, and of one command that
the product has."""

from __future__ import annotations

import re

import pytest

from loraplex.cli import COMMANDS
from tests.k8s.test_manifests import OWN, command_of, own_containers
from tools.manifests import ROOT

IMAGES = ROOT.parent / "images"
FILES = sorted(IMAGES.glob("*.Containerfile"))
EXACT = re.compile(r"ARG BASE=docker\.io/library/python:\d+\.\d+\.\d+-slim-\w+\n")


def last_stage(text: str) -> str:
    return text[text.rindex("\nFROM ") :]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.split(".")[0])
def test_an_image_is_confined_and_pinned(file) -> None:
    text = file.read_text()
    assert EXACT.search(text) and "imagetools inspect" in text, "how its base is pinned"
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "build", "${BASE}"]
    own = last_stage(text)
    assert re.findall(r"^USER (.*)$", own, re.MULTILINE) == ["10001:10001"]
    assert "sbom.json" in own and own.count("\nCMD ") == 1 and "ENTRYPOINT" not in own
    name = file.name.split(".")[0]
    lock = f"{name if name.startswith('worker') else 'planes'}.lock"
    assert f"COPY images/{lock} " in text and f"--require-hashes -r /src/{lock}" in text
    has_compiler = re.search(r"\b(gcc|g\+\+|clang)\b", own.partition("CMD")[0]) is not None
    assert has_compiler is (file.name == "worker-cuda.Containerfile")
    assert ("ops.precompile" in text) is (file.name == "worker-cpu.Containerfile")


def test_each_image_of_the_manifests_runs_what_they_run() -> None:
    asked: set[str] = set()
    for overlay in ("multi-node", "single-gpu"):
        for _, container in own_containers(overlay):
            found = OWN.fullmatch(container["image"])
            assert found is not None
            asked.add(found[1])
            text = (IMAGES / f"{found[1]}.Containerfile").read_text()
            (line,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
            words = [word.strip('" ') for word in line.split(",")]
            assert words[0] == "loraplex" and words[1] in COMMANDS
            if command_of(container)[1] != "migrate":
                assert command_of(container) == words
    assert asked == {file.name.split(".")[0] for file in FILES}
