"""Reads the added tokens and the end token of the tokenizer in an adapter's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from loraplex.folder_serving import TOKENIZER_NAME, read_json

MAX_TOKENS = 512
MAX_TOKEN_CHARS = 256
MAX_TOKENIZER_BYTES = 256 << 20


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_folder_tokens(folder: Path) -> dict[str, Any]:
    """Returns the upload's field `folder_tokens`: the ids of the tokens that were added to the
    folder's tokenizer, and the token that ends a text. Of many tokens, returns those with the
    highest ids, because new tokens have them. Returns an empty object if there is no tokenizer."""
    found: dict[str, Any] = {}
    added = _added_tokens(folder)
    newest = sorted(added, key=added.__getitem__, reverse=True)[:MAX_TOKENS]
    if tokens := {token: added[token] for token in newest if len(token) <= MAX_TOKEN_CHARS}:
        found["added"] = tokens
    for name in (TOKENIZER_NAME, "special_tokens_map.json"):
        end = read_json(folder / name).get("eos_token")
        text = end.get("content") if isinstance(end, dict) else end
        if isinstance(text, str) and 0 < len(text) <= MAX_TOKEN_CHARS:
            return found | {"end": text}
    return found


def _added_tokens(folder: Path) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if file.is_file() and file.stat().st_size <= MAX_TOKENIZER_BYTES:
        try:
            tokenizer = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return {token.content: token.id for token in tokenizer.added_tokens}
    tokens = read_json(folder / "added_tokens.json")
    return {token: id for token, id in tokens.items() if isinstance(id, int)}
