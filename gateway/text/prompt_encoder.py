"""Encodes prompts, with a cache of the token ids of pieces that were encoded before.

A chat template writes special tokens around each message, and a tokenizer first splits a text at
special tokens. So a conversation can be encoded piece by piece, and the pieces of earlier turns are
usually in the cache.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.exceptions import ContextLengthExceeded
from gateway.text.long_texts import LongTexts
from gateway.text.sliced_encoder import Kept, SlicedEncoder

MAX_CHARS = 8 << 20
"""Maximum number of characters of all cached pieces, including PIECE_CHARS for each piece. A
character and its token ids take two to eight bytes of memory."""
PIECE_CHARS = 256
"""Number of characters that take as much memory as a cached piece takes in addition to its text."""
TEXT_CHARS = 12
"""Number of characters that take as long to encode as the call for one text."""
LONGEST_SHARE = 16
"""A piece is not cached if it is larger than the cache's capacity divided by this number."""
MAX_PIECES = 4096
"""Maximum number of pieces into which a text is split on the event loop."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class TokenizerFile(msgspec.Struct):
    """Fields of tokenizer.json that the gateway uses."""

    added_tokens: list[_AddedToken] = []
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class PromptEncoder:
    """Encoder of prompts with a cache of pieces."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        file: TokenizerFile,
        template: str,
        long_texts: LongTexts,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """`template` is the model's chat template. Texts are split only at special tokens that
        occur in the template, because every text is searched for each of these tokens, and a
        vocabulary may have thousands of special tokens."""
        self._sliced = SlicedEncoder(tokenizer)
        word = tokenizer.encode("no")
        added = "".join(map(str, word.special_tokens_mask))
        begin, end = len(added) - len(added.lstrip("1")), len(added.rstrip("1"))
        self.added_tokens = word.ids[:begin], word.ids[max(begin, end) :]
        """Special tokens that the tokenizer adds before and after a text."""
        self._ids = _parting_tokens(file, template)
        self._parts = re.compile(f"({'|'.join(map(re.escape, self._ids))})")
        self._long_texts = long_texts
        self._max_chars = max_chars
        self._num_chars = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    @property
    def num_chars(self) -> int:
        """Number of characters of all cached pieces, including PIECE_CHARS for each."""
        return self._num_chars

    async def encode(self, text: str, domain: str, max_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text. The cache does not change the result. Adds no special
        tokens. A piece that only another `domain` has encoded is encoded again, so that timing does
        not reveal other tenants' prompts. Raises ContextLengthExceeded if the text has more than
        `max_tokens` tokens."""
        if not self._ids or self._has_many_pieces(text):
            (tokens,) = await self.encode_each(
                [text], domain, add_special_tokens=False, max_tokens=max_tokens
            )
            return tokens
        pieces = self._parts.split(text)
        found: dict[str, Sequence[int]] = {}
        missing: list[str] = []
        for piece in dict.fromkeys(pieces[::2]):
            known = self._known.get((domain, piece))
            if known is not None:
                self._known.move_to_end((domain, piece))
                found[piece] = known
            elif piece:
                missing.append(piece)
        if missing:

            def check(num_tokens: int) -> None:
                _check_length(num_tokens, max_tokens)

            encoded = await self.encode_each(
                missing, domain, add_special_tokens=False, max_tokens=max_tokens, check_sum=check
            )
            for piece, ids in zip(missing, encoded, strict=True):
                found[piece] = ids
                self._remember((domain, piece), ids)
        _check_length(
            sum([len(found[piece]) for piece in pieces[::2] if piece]) + len(pieces) // 2,
            max_tokens,
        )
        tokens: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                tokens.append(self._ids[piece])
            elif piece:
                tokens += found[piece]
        return tokens

    def _has_many_pieces(self, text: str) -> bool:
        """Returns whether a text may have so many pieces that splitting it would block the event
        loop."""
        return len(text) > MAX_PIECES and sum(map(text.count, self._ids)) > MAX_PIECES

    async def encode_each(
        self,
        texts: list[str],
        domain: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        kept: Kept | None = None,
        check_sum: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Encodes texts without the cache. Long texts of one `domain` are encoded one after the
        other. `kept` tells how each text is truncated, apart from special tokens. Raises
        ContextLengthExceeded as soon as a text has more than `max_tokens` tokens. Calls `check_sum`
        with the number of tokens so far after each text, and stops if it raises."""
        begin, end = self.added_tokens if add_special_tokens else ([], [])
        num_added = len(begin) + len(end)

        def encode() -> list[list[int]]:
            encoded: list[list[int]] = []
            num_tokens = 0
            for text in texts:
                if kept is not None:
                    inner = self._sliced.encode_part(text, kept)
                elif max_tokens is not None:
                    inner = self._sliced.encode(text, max(max_tokens - num_added, 0))
                else:
                    inner = self._sliced.encode(text)
                num_tokens += len(inner) + num_added
                _check_length(len(inner) + num_added, max_tokens)
                if check_sum is not None:
                    check_sum(num_tokens)
                encoded.append([*begin, *inner, *end] if num_added else inner)
            return encoded

        size = sum(map(len, texts)) + TEXT_CHARS * len(texts)
        return await self._long_texts.do(domain, size, encode)

    def _remember(self, key: tuple[str, str], ids: list[int]) -> None:
        num_chars = len(key[1]) + PIECE_CHARS
        if key in self._known or num_chars * LONGEST_SHARE > self._max_chars:
            return
        self._known[key] = array("I", ids)
        self._num_chars += num_chars
        while self._num_chars > self._max_chars:
            (_, piece), _ = self._known.popitem(last=False)
            self._num_chars -= len(piece) + PIECE_CHARS


def _check_length(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_tokens} tokens. However, your text has "
            f"{num_tokens} tokens or more."
        )


def _parting_tokens(file: TokenizerFile, template: str) -> dict[str, int]:
    """Returns the special tokens of the template, with their ids, at which a text can be split so
    that its pieces, encoded separately, have the token ids of the whole text. Returns an empty dict
    if a piece's token ids may depend on the text around it."""
    if any(token.single_word for token in file.added_tokens) or _marks_first(file.pre_tokenizer):
        return {}
    found_first = [token for token in file.added_tokens if not token.normalized]
    return {
        token.content: token.id
        for token in found_first
        if token.special
        and token.content in template
        and not (token.lstrip or token.rstrip)
        and token.content == token.content.strip() != ""
        and not any(
            _may_hide(other.content, token.content) for other in found_first if other is not token
        )
    }


def _may_hide(other: str, token: str) -> bool:
    """Returns whether a match of `other` can keep the tokenizer from matching `token`. This is
    possible if `other` contains `token`, or ends with the beginning of `token`, because the
    tokenizer prefers the earliest match, then the longest."""
    return token in other or any(other.endswith(token[:end]) for end in range(1, len(token)))


def _marks_first(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Returns whether the pre-tokenizer treats the first word of a text differently from later ones
    (`prepend_scheme: first`)."""
    steps = [pre_tokenizer] if pre_tokenizer else []
    while steps:
        step = steps.pop()
        steps += step.get("pretokenizers", [])
        if step.get("prepend_scheme") == "first":
            return True
    return False
