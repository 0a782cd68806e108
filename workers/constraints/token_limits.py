"""Limits on the tokens that a sequence may generate, according to its request's `TokenRules`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.wire.protocol import ThoughtBound, TokenRules

MAX_BEFORE_THOUGHT = 4
"""Number of generated tokens within which a thought (the reasoning before an answer) must begin. If
none of them begins a thought, the answer counts as an answer without a thought."""


class TokenLimits:
    """Implementation of `Constraint` for the token rules of one request."""

    is_ready = True
    failure = None

    def __init__(self, rules: TokenRules, vocab_size: int, generated: Sequence[int]) -> None:
        """generated: tokens of the sequence that another worker generated."""
        self._vocab_size = vocab_size
        self._allowed = self._mask(rules.allowed) if rules.allowed else None
        self._always = frozenset(banned[0] for banned in rules.banned if len(banned) == 1)
        self._endings: dict[int, list[list[int]]] = defaultdict(list)
        """Banned sequences of two or more tokens, by the second-to-last token of each."""
        for banned in rules.banned:
            if len(banned) > 1:
                self._endings[banned[-2]].append(list(banned))
        self._num_kept = max(map(len, rules.banned), default=0) - 1
        self._last: list[int] = []
        """Last generated tokens. Their maximum number is the length of the longest banned sequence
        minus 1."""
        self._thought: ThoughtBound | None = rules.thought
        """Limit of the thought. None if the answer has no thought, or its thought has ended."""
        self._is_thinking = rules.thought is not None and rules.thought.is_begun
        self._num_before = 0
        self._num_thought = 0
        self.advance(generated)

    @property
    def needs_host_token(self) -> bool:
        return bool(self._endings) or self._thought is not None

    @property
    def mask(self) -> NDArray[Any] | None:
        """Mask of the allowed tokens, or None if all are allowed. Once a thought has reached its
        maximum length, the mask allows only the token that ends the thought."""
        thought = self._thought
        if thought is None or not self._is_thinking or self._num_thought < thought.max_tokens:
            return self._allowed
        return self._mask((thought.end,))

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not be sampled next, because they would complete a banned sequence."""
        if not self._endings or not self._last:
            return self._always
        found = [
            banned[-1]
            for banned in self._endings.get(self._last[-1], ())
            if self._last[1 - len(banned) :] == banned[:-1]
        ]
        return self._always.union(found) if found else self._always

    def advance(self, tokens: Sequence[int]) -> None:
        if self._endings:
            self._last = [*self._last, *tokens][-self._num_kept :]
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

    def forced(self) -> list[int]:
        return []

    def close(self) -> None:
        pass

    def _mask(self, tokens: Iterable[int]) -> NDArray[Any]:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view("<i4")
