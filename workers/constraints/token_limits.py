"""Tokens that a sequence may draw by the `TokenRules` of its request, updated token by token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.wire.protocol import ThoughtBound, TokenRules

MAX_BEFORE_THOUGHT = 4
"""Maximum number of tokens, such as white space, before the token that begins a thought. An answer
that begins otherwise has no thought."""


class TokenLimits:
    def __init__(self, rules: TokenRules, vocab_size: int, generated: Sequence[int]) -> None:
        """generated: tokens that another worker generated."""
        self._vocab_size = vocab_size
        self._allowed = self._mask(rules.allowed) if rules.allowed else None
        self._always = frozenset(banned[0] for banned in rules.banned if len(banned) == 1)
        self._endings: dict[int, list[list[int]]] = defaultdict(list)
        """Banned sequences of several tokens, by the token before their last."""
        for banned in rules.banned:
            if len(banned) > 1:
                self._endings[banned[-2]].append(list(banned))
        self._thought: ThoughtBound | None = rules.thought
        """None if there is no thought, or it has ended."""
        self._is_thinking = rules.thought is not None and rules.thought.is_begun
        self._num_before = 0
        self._num_thought = 0
        self.take(generated)

    @property
    def needs_host_token(self) -> bool:
        """Whether the host must have read the last token before the next is drawn."""
        return bool(self._endings) or self._thought is not None

    @property
    def ends_thought(self) -> bool:
        """Whether the thought has reached its maximum length, so that only its end may follow."""
        thought = self._thought
        return self._is_thinking and thought is not None and self._num_thought >= thought.max_tokens

    @property
    def mask(self) -> NDArray[Any] | None:
        """Mask of the tokens that may follow, as in `SampleInput`; None: any."""
        if self._thought is not None and self.ends_thought:
            return self._mask((self._thought.end,))
        return self._allowed

    def take(self, tokens: Sequence[int]) -> None:
        """Updates the state by generated tokens."""
        for token in tokens:
            if self._thought is None:
                return
            if token == self._thought.end:
                self._thought = None
            elif self._is_thinking:
                self._num_thought += 1
            elif token == self._thought.begin:
                self._is_thinking = True
            else:
                self._num_before += 1
                if self._num_before == MAX_BEFORE_THOUGHT:
                    self._thought = None

    def banned_after(self, tokens: Sequence[int], num_prompt: int) -> frozenset[int]:
        """Returns the tokens that would complete a banned sequence. `tokens` begin with the prompt,
        which is not part of any banned sequence."""
        num_generated = len(tokens) - num_prompt
        if not num_generated or not self._endings:
            return self._always
        found = [
            banned[-1]
            for banned in self._endings.get(tokens[-1], ())
            if len(banned) <= num_generated + 1 and tokens[1 - len(banned) :] == banned[:-1]
        ]
        return self._always.union(found) if found else self._always

    def _mask(self, tokens: Iterable[int]) -> NDArray[Any]:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view("<i4")


def kept(banned: frozenset[int], mask: NDArray[Any] | None) -> frozenset[int]:
    """Returns the banned tokens, or none of them if the mask allows no other token."""
    if mask is None or not banned:
        return banned
    left = np.unpackbits(mask.view(np.uint8), bitorder="little")
    left[list(banned)] = 0
    return banned if left.any() else frozenset()
