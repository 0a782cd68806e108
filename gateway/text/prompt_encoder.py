"""Prompts to token ids without tokenising again what was tokenised before.

A chat template puts special tokens around each message, and a tokenizer parts a text at those
before it does anything else. So a conversation is encoded by its pieces, and those that came
before, the system prompt and all turns but the last, are remembered.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.exceptions import ContextLengthExceeded
from gateway.text.long_texts import LongTexts

MAX_CHARS = 8 << 20
"""Bound of the pieces that are remembered, with what each takes beside its text. A character takes
two to eight bytes: its own, and its part of the ids."""
PIECE_CHARS = 256
"""What a piece takes beside its text."""
LONGEST_SHARE = 16
"""No piece is remembered that takes more than this part of all."""
MAX_PIECES = 4096
"""Most pieces that one text is parted into."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class TokenizerFile(msgspec.Struct):
    """What is read here of a tokenizer.json."""

    added_tokens: list[_AddedToken] = []
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class PromptEncoder:
    """Without the special tokens that a post-processor adds: templates write their own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        file: TokenizerFile,
        template: str,
        long_texts: LongTexts,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """Texts are parted at the special tokens that the model's
        chat template writes, for a vocabulary may have thousands, and every text is searched for
        them."""
        self._tokenizer = tokenizer
        self._ids = _parting_tokens(file, template)
        self._parts = re.compile(f"({'|'.join(map(re.escape, self._ids))})")
        self._long_texts = long_texts
        self._max_chars = max_chars
        self._num_chars = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    @property
    def num_chars(self) -> int:
        """That are remembered."""
        return self._num_chars

    async def encode(self, text: str, domain: str, max_tokens: int | None = None) -> list[int]:
        """As the tokenizer itself. What was encoded for another domain is encoded anew: the time
        that takes tells no tenant what others ask. Raises ContextLengthExceeded."""
        if not self._ids or self._has_many_pieces(text):
            (tokens,) = await self.encode_each(
                [text], domain, add_special_tokens=False, max_tokens=max_tokens
            )
            return tokens
        pieces = self._parts.split(text)
        found: dict[str, Iterable[int]] = {}
        missing: list[str] = []
        for piece in dict.fromkeys(pieces[::2]):
            known = self._known.get((domain, piece))
            if known is not None:
                self._known.move_to_end((domain, piece))
                found[piece] = known
            elif piece:
                missing.append(piece)
        if missing:
            encoded = await self.encode_each(
                missing, domain, add_special_tokens=False, max_tokens=max_tokens
            )
            for piece, ids in zip(missing, encoded, strict=True):
                found[piece] = ids
                self._remember((domain, piece), ids)
        tokens: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                tokens.append(self._ids[piece])
            elif piece:
                tokens += found[piece]
        return tokens

    def _has_many_pieces(self, text: str) -> bool:
        """More than a conversation has: to part and remember them would hold up the loop."""
        return len(text) > MAX_PIECES and sum(map(text.count, self._ids)) > MAX_PIECES

    async def encode_each(
        self,
        texts: list[str],
        domain: str,
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Anew; those that are long while others of the domain wait. Raises ContextLengthExceeded,
        before it makes a list of the ids, if one text has more than `max_tokens`."""

        def encode() -> list[list[int]]:
            # Fast: without the place of each token in its text, which is not needed.
            encoded = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
            longest = max(map(len, encoded), default=0)
            if max_tokens is not None and longest > max_tokens:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {max_tokens} tokens. However, your "
                    f"text has {longest} tokens."
                )
            return [each.ids for each in encoded]

        return await self._long_texts.do(domain, sum(map(len, texts)), encode)

    def _remember(self, key: tuple[str, str], ids: list[int]) -> None:
        num_chars = len(key[1]) + PIECE_CHARS
        if key in self._known or num_chars * LONGEST_SHARE > self._max_chars:
            return
        self._known[key] = array("I", ids)
        self._num_chars += num_chars
        while self._num_chars > self._max_chars:
            (_, piece), _ = self._known.popitem(last=False)
            self._num_chars -= len(piece) + PIECE_CHARS


def _parting_tokens(file: TokenizerFile, template: str) -> dict[str, int]:
    """The special tokens of the template at which a text falls into pieces that become the same ids
    wherever they stand, with their own; none where a piece depends on what is beside it."""
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
    """Whether in some text `other` is found where `token` stands: it holds it, or begins before it
    and ends in it. Of two the tokenizer takes what begins first, then the longer."""
    return token in other or any(other.endswith(token[:end]) for end in range(1, len(token)))


def _marks_first(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether the first word of a text is another than the same one after a special token."""
    steps = [pre_tokenizer] if pre_tokenizer else []
    while steps:
        step = steps.pop()
        steps += step.get("pretokenizers", [])
        if step.get("prepend_scheme") == "first":
            return True
    return False
