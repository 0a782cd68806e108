"""Tokens of an adapter's folder, searched for in the vocabulary of a base model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from admin.models.folder_tokens import FolderTokens, compare_tokens

ODD = ['"', "\\", "\\\\", '\\"', "é", "\u2028", "\n", ":", ", ", "a: 1", "[", "\U0001f389"]


def base(folder: Path, vocab: Any) -> Path:
    added = [{"id": 900, "content": "<end>"}]
    told = {"model": {"vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


@pytest.mark.parametrize("is_ascii", [True, False])
def test_each_token_of_a_vocabulary_is_found(tmp_path: Path, is_ascii: bool) -> None:
    vocab = {token: number for number, token in enumerate(ODD)}
    text = json.dumps({"model": {"vocab": vocab}}, ensure_ascii=is_ascii)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    for token, number in vocab.items():
        assert compare_tokens(FolderTokens({token: 5}, token), tmp_path) == (number, [])
        (warning,) = compare_tokens(FolderTokens({f"{token}x": 5}), tmp_path)[1]
        assert warning.endswith(f": {token}x")


def test_a_vocabulary_with_scores_has_no_ids(tmp_path: Path) -> None:
    folder = base(tmp_path, [[token, -1.5] for token in ODD])
    for token in ODD:
        assert compare_tokens(FolderTokens({token: 5}, token), folder) == (None, [])
    assert compare_tokens(FolderTokens({}, "<end>"), folder) == (900, [])
    assert compare_tokens(FolderTokens({"-1.5": 5}), folder)[1]


def test_the_vocabulary_is_searched_once_for_all_tokens(tmp_path: Path) -> None:
    folder = base(tmp_path, {f"token{number}": number for number in range(200_000)})
    tokens = FolderTokens({f"<é{number}>": number for number in range(512)})
    began = time.process_time()
    end, (warning,) = compare_tokens(tokens, folder)
    assert time.process_time() - began < 1
    assert end is None and "and 492 more" in warning
