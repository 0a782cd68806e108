"""Ids of a model's vocabulary that have no token."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tokenizers import Tokenizer


def read_unnamed_ids(folder: Path, vocab_size: int, end_tokens: Collection[int]) -> list[int]:
    """Returns the ids for which the model's tokenizer.json has no token, without end tokens. The
    output matrix has rows for them because its number of rows was rounded up. Returns [] if the
    model has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    tokens = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    named = {*tokens.values(), *end_tokens}
    return [token for token in range(vocab_size) if token not in named]
