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
_ENTRY = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")\s*(?::\s*(\d+)|,)')
"""Matches an entry of a vocabulary. Group 1 is the token, as JSON. Group 2 is its id, unless the
vocabulary is a list, whose entries begin `["token",`."""
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
    wanted = list(tokens.added)
    if tokens.end is not None and tokens.end not in tokens.added:
        wanted.append(tokens.end)
    ids = _find_tokens(folder, set(wanted))
    warnings: list[str] = []
    if lacking := [token for token in wanted if token not in ids]:
        more = f" and {len(lacking) - MAX_NAMED} more" if len(lacking) > MAX_NAMED else ""
        warnings.append(
            "the folder's tokenizer has tokens that the base model lacks, which are split into"
            f" other tokens: {', '.join(lacking[:MAX_NAMED])}{more}"
        )
    end = ids.get(tokens.end or "", -1)
    return (end if end >= 0 else None), warnings


def _find_tokens(folder: Path, tokens: set[str]) -> dict[str, int]:
    """Returns the ids of those of the tokens that a base model has, or -1 for a token whose id its
    vocabulary does not say. Searches the text of tokenizer.json, because to decode the whole
    vocabulary takes too much memory."""
    raw = (folder / "tokenizer.json").read_bytes()
    tokenizer = msgspec.json.decode(raw, type=_Tokenizer)
    found = {each.content: each.id for each in tokenizer.added_tokens if each.content in tokens}
    forms = {
        json.dumps(token, ensure_ascii=is_ascii).encode(): token
        for token in tokens - found.keys()
        for is_ascii in (True, False)
    }
    for match in _ENTRY.finditer(bytes(tokenizer.model.vocab)) if forms else ():
        if (token := forms.get(match[1])) is not None:
            found.setdefault(token, int(match[2] or -1))
    return found
