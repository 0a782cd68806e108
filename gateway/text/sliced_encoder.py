"""Encodes long texts in slices, so that memory and time do not grow with text that is not used.

The tokenizers library takes about 140 bytes of memory for each token, and holds the tokens of a
whole text at once. A token may depend on the text before and after it, so a text cannot be cut
anywhere. Therefore slices overlap, and two slices are joined inside a run of tokens that both have
at the same places. For BPE one common token would be enough, because tokens are those of a text if
each two neighbours are. Slices of other tokenizers, which weigh all tokens of a word together, are
joined only where a word begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple
from unicodedata import combining

from tokenizers import Encoding, Tokenizer, models

from gateway.exceptions import InvalidRequest

SLICE_CHARS = 16 << 10
"""Length of a slice in characters. Its tokens take at most about 10 MB of memory."""
MIN_SLICE_CHARS = 1 << 10
TOKEN_CHARS = 8
"""Minimum number of characters of a slice for each token that is needed, if few are needed."""
MAX_SLICE_CHARS = 64 << 10
"""Length in characters up to which a slice grows if no slice can be joined to it."""
MAX_LOOK_BACK = 256 << 10
"""Number of characters before the kept tokens of a truncated text in which the beginning of a run
is searched for."""
OVERLAP = 8
"""A slice has this part of its characters in common with the slice before it: 1/8."""
MIN_COMMON = 8
"""Minimum number of consecutive tokens that two slices must have in common to be joined."""
MAX_SHIFT = 16
"""Number of places at which a slice is tried to begin, one character after another. More than one
is needed in a run of one character, where the tokens depend on the place at which a slice begins
if the tokenizer writes a space before each text."""
LOOK_BACK = 1021
"""Number of characters before the beginning of a slice from which the text is encoded again to
check the slice's first tokens. A prime number, so that tokens that repeat in a run of one character
are not at the same places by chance."""


class Kept(NamedTuple):
    """Tokens that are kept of a text that is truncated."""

    num_tokens: int
    side: Literal["left", "right"]
    """Side at which other tokens are removed."""

    def of(self, tokens: list[int]) -> list[int]:
        """Returns the tokens that are kept of a list of token ids."""
        if self.side == "right":
            return tokens[: self.num_tokens]
        return tokens[max(0, len(tokens) - self.num_tokens) :]


class SlicedEncoder:
    """Encoder of texts to the token ids that the tokenizer has for the whole text. Adds no special
    tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_bpe = isinstance(tokenizer.model, models.BPE)
        steps: bytes = (
            b"" if tokenizer.pre_tokenizer is None else tokenizer.pre_tokenizer.__getstate__()
        )
        self._looks_ahead = b"(?=" in steps
        """Whether words depend on much text after them. Such tokenizers count groups of three
        digits from a number's end."""

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text. If it has more than `max_tokens` tokens, returns only
        the first of them, at least one more than `max_tokens`. Raises InvalidRequest if a long text
        has no place at which it can be divided."""
        tokens = array("I")
        size = SLICE_CHARS
        if max_tokens is not None:
            size = min(size, max(MIN_SLICE_CHARS, TOKEN_CHARS * max_tokens))
        for ids in self._slices(text, size):
            tokens.extend(ids)
            if max_tokens is not None and len(tokens) > max_tokens:
                break
        return tokens.tolist()

    def encode_part(self, text: str, kept: Kept) -> list[int]:
        """Returns the token ids of a text that is truncated. Takes time for the kept tokens only.
        If the beginning is removed inside a run of one character that is longer than
        `MAX_LOOK_BACK`, the run may have other tokens than in the whole text."""
        if kept.side == "right":
            return kept.of(self.encode(text, kept.num_tokens))
        num_chars = kept.num_tokens + LOOK_BACK
        while num_chars < len(text):
            start = len(text) - num_chars
            num_uncertain = self._uncertain_tokens(text, start)
            if num_uncertain is None and num_chars > kept.num_tokens + MAX_LOOK_BACK:
                num_uncertain = 0
            if num_uncertain is not None:
                tokens = self.encode(text[start:])[num_uncertain:]
                if len(tokens) >= kept.num_tokens:
                    return kept.of(tokens)
            num_chars *= 2
        return kept.of(self.encode(text))

    def _uncertain_tokens(self, text: str, start: int) -> int | None:
        """Returns the number of tokens at the beginning of `text[start:]` that may differ from the
        tokens of the whole text. Returns None if no number is certain."""
        end = min(start + 2 * LOOK_BACK, len(text))
        earlier = self._slice(text, max(start - LOOK_BACK, 0), end)
        joint = self._slice(text, start, end).joint(earlier.head(end), end)
        return None if joint is None else joint[1]

    def _slices(self, text: str, size: int) -> Iterator[list[int]]:
        """Yields the token ids of one part of the text after another. `size` is the length of the
        first slices in characters."""
        current, num_done = self._slice(text, 0, min(size, len(text))), 0
        length = size
        while (end := current.end) < len(text):
            overlap = length // OVERLAP
            tail = current.tail(end - overlap)
            joined = self._following(text, tail, end, min(end + length - overlap, len(text)))
            if joined is not None:
                following, (num_last, num_first) = joined
                yield current.ids[num_done : len(current.ids) - len(tail) + num_last]
                current, num_done, length = following, num_first, size
            elif length < MAX_SLICE_CHARS:
                length *= 2
                current = self._slice(text, current.start, min(current.start + length, len(text)))
            else:
                raise InvalidRequest(
                    f"Between its characters {current.start} and {end}, the text has no place at "
                    "which it can be divided to count its tokens, for example because one "
                    "character is repeated. Shorten this part.",
                    code="text_indivisible",
                )
        yield current.ids[num_done:]

    def _following(
        self, text: str, tail: list[_Token], end: int, next_end: int
    ) -> tuple[_Slice, tuple[int, int]] | None:
        """Returns the slice up to `next_end` that follows a slice up to `end`, whose last tokens
        are `tail`, and the joint of both. Returns None if they have no joint."""
        first = tail[0].start if tail else end
        for start in range(first, min(first + MAX_SHIFT, end)):
            # All but the first place are tried with little text, because most of them will fail.
            if start > first and not self._slice(text, start, end).joint(tail, end):
                continue
            following = self._slice(text, start, next_end)
            joint = following.joint(tail, end)
            if joint is not None:
                return following, joint
        return None

    def _slice(self, text: str, start: int, end: int) -> _Slice:
        # Unlike `encode`, this lets other threads run, such as the event loop's.
        (encoding,) = self._tokenizer.encode_batch([text[start:end]], add_special_tokens=False)
        words = None if self._is_bpe else encoding.word_ids

        def may_join(index: int, position: int) -> bool:
            if words is not None and (index == 0 or words[index] == words[index - 1]):
                return False
            if self._looks_ahead and text[max(position - 1, 0) : position + 1].isnumeric():
                return False
            # Normalizers sort the combining characters of a run.
            return not combining(text[position])

        return _Slice(start, end, encoding, encoding.ids, may_join)


class _Token(NamedTuple):
    start: int
    """Position of the token's first character in the whole text."""
    end: int
    id: int


class _Slice(NamedTuple):
    """Tokens of a part of a text."""

    start: int
    end: int
    encoding: Encoding
    ids: list[int]
    may_join: Callable[[int, int], bool]
    """Returns whether slices may be joined before a token, from the token's index in this slice and
    the position of its first character in the text."""

    def head(self, end: int) -> list[_Token]:
        """Returns the first tokens: those that end at `end` or earlier."""
        tokens: list[_Token] = []
        for index in range(len(self.ids)):
            token = self._token(index)
            if token.end > end:
                break
            tokens.append(token)
        return tokens

    def tail(self, start: int) -> list[_Token]:
        """Returns the last tokens: those that begin at `start` or later."""
        tokens: list[_Token] = []
        for index in range(len(self.ids) - 1, -1, -1):
            token = self._token(index)
            if token.start < start:
                break
            tokens.append(token)
        return tokens[::-1]

    def joint(self, tail: list[_Token], end: int) -> tuple[int, int] | None:
        """Finds a token of this slice before which the slice can be joined to another slice, which
        ends at `end` with the tokens `tail`. Returns the token's indexes in `tail` and in this
        slice. Returns None if there is none, because too few tokens are in both."""
        head = self.head(end)
        run = at = index = 0
        while at < len(tail) and index < len(head):
            if tail[at] == head[index]:
                if run >= MIN_COMMON and self.may_join(index, head[index].start):
                    return at, index
                run, at, index = run + 1, at + 1, index + 1
                continue
            run = 0
            span, other = tail[at][:2], head[index][:2]
            at, index = at + (span <= other), index + (other <= span)
        return None

    def _token(self, index: int) -> _Token:
        start, end = self.encoding.token_to_chars(index) or (0, 0)
        return _Token(self.start + start, self.start + end, self.ids[index])
