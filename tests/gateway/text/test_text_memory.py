"""Reading and refusing texts takes a bounded amount of memory, whatever tokens they have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles import CHAT_TEMPLATE
from tests.gateway.text.text_memory import REQUESTS
from tests.workers.importer.test_tokenizer_parity import smollm
from tools.source_tree import ROOT

MAX_BYTES = 64 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer, whose longest token lets long texts pass the first check."""
    folder = tmp_path_factory.mktemp("model")
    smollm().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


QUICK = ("chat", "completions", "completion, end kept", "pairs")
"""Requests of the first tier: refused at once, refused when they are read, and truncated."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in REQUESTS],
)
def test_texts_take_bounded_memory(folder: Path, name: str) -> None:
    command = [sys.executable, "-m", "tests.gateway.text.text_memory", str(folder), name]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    outcome, num_bytes, cpu_s = json.loads(answer.stdout.splitlines()[-1])
    print(f"{name}: {outcome}, {num_bytes >> 20} MiB, {cpu_s:.2f} s")
    assert num_bytes < MAX_BYTES
    assert outcome == OUTCOMES.get(name, "context_length_exceeded")


OUTCOMES = {
    "completions": "request_too_large",
    "embeddings": "request_too_large",
    "pairs": "request_too_large",
    "completion, end kept": "[8]",
    "completion, beginning kept": "[8]",
    "chat, end kept": "[8]",
    "documents of some tokens": "[85]",
    "documents, end kept": "[197]",
    "query, beginning kept": "invalid",
    "legal": "[8192]",
}
