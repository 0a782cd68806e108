"""Compares the tokenizer in an adapter's folder with the tokenizer of the base model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import msgspec

from store.errors import Invalid
from store.stored_text import check_json

MAX_NAMED = 20
Token = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class FolderTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of the tokenizer in an adapter's folder. added: ids of tokens that were added to its
    vocabulary. end: token that ends a text."""

    added: Annotated[dict[Token, int], msgspec.Meta(max_length=512)] = {}
    end: Token | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


class BaseTokens:
    """Vocabulary of a base model. Searches the text of tokenizer.json, because to decode the whole
    vocabulary takes too much memory."""

    def __init__(self, folder: Path) -> None:
        """folder: folder of the base model in the store."""
        raw = (folder / "tokenizer.json").read_bytes()
        tokenizer = msgspec.json.decode(raw, type=_Tokenizer)
        self._added = {token.content: token.id for token in tokenizer.added_tokens}
        self._vocabulary = bytes(tokenizer.model.vocab)

    def find(self, token: str) -> int | None:
        """Returns the id of a token. Returns -1 if the vocabulary has the token without an id, and
        None if it lacks the token."""
        if (found := self._added.get(token)) is not None:
            return found
        for text in {json.dumps(token), json.dumps(token, ensure_ascii=False)}:
            key = re.escape(text.encode("utf-8", "surrogatepass"))
            if (match := re.search(key + rb"\s*:\s*(\d+)", self._vocabulary)) is not None:
                return int(match[1])
            if re.search(rb"\[\s*" + key + rb"\s*,", self._vocabulary) is not None:
                return -1
        return None


def parse_folder_tokens(written: msgspec.Raw) -> FolderTokens:
    """Parses the field `folder_tokens` of an upload. Raises Invalid."""
    if not bytes(written):
        return FolderTokens()
    try:
        tokens = msgspec.json.decode(written, type=FolderTokens)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"folder_tokens: {error}", "serving_invalid", "folder_tokens") from None
    check_json(bytes(written), "folder_tokens")
    return tokens


def compare_tokens(tokens: FolderTokens, folder: Path) -> tuple[int | None, list[str]]:
    """Returns the base model's id of the token that ends a text, or None if there is none, and
    warnings that name the tokens that the base model lacks. folder: folder of the base model in the
    store."""
    if tokens == FolderTokens():
        return None, []
    base = BaseTokens(folder)
    wanted = [*tokens.added, *([tokens.end] if tokens.end is not None else [])]
    lacking = [token for token in dict.fromkeys(wanted) if base.find(token) is None]
    warnings: list[str] = []
    if lacking:
        more = f" and {len(lacking) - MAX_NAMED} more" if len(lacking) > MAX_NAMED else ""
        warnings.append(
            "the folder's tokenizer has tokens that the base model lacks, which are split into"
            f" other tokens: {', '.join(lacking[:MAX_NAMED])}{more}"
        )
    end = None if tokens.end is None else base.find(tokens.end)
    return (end if end is not None and end >= 0 else None), warnings
