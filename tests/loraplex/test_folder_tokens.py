"""What is read of the tokenizer in an adapter's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.folder_tokens import MAX_TOKENS, read_folder_tokens

ADDED = [{"id": 9, "content": "<x>", "special": True}, {"id": 3, "content": "</s>"}]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, {}),
        ({"tokenizer.json": {"added_tokens": ADDED}}, {"added": {"<x>": 9, "</s>": 3}}),
        ({"added_tokens.json": {"<x>": 9}}, {"added": {"<x>": 9}}),
        ({"tokenizer_config.json": {"eos_token": "<e>"}}, {"end": "<e>"}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<e>"}}}, {"end": "<e>"}),
        ({"special_tokens_map.json": {"eos_token": "<e>"}}, {"end": "<e>"}),
        ({"tokenizer_config.json": {"eos_token": None}}, {}),
        ({"tokenizer.json": {"added_tokens": [{"id": 1}]}}, {}),
    ],
)
def test_what_is_found(tmp_path: Path, files: dict[str, Any], found: dict[str, Any]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_folder_tokens(tmp_path) == found


def test_of_many_tokens_the_newest_are_sent(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({f"<{n}>": n for n in range(2000)}))
    added = read_folder_tokens(tmp_path)["added"]
    assert len(added) == MAX_TOKENS and added["<1999>"] == 1999
