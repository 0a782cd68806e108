"""Keys of full KV pages. Sequences share a page if and only if they have the same key for it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

PAGE_TOKENS = 16
"""Tokens per page; the op backends use the same number."""


def pages_of(num_tokens: int) -> int:
    """Returns the number of pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


class PageHasher:
    """Computes the keys of pages of one model, with one adapter (or none), in one cache domain.

    key = SHA-256 over tagged, length-prefixed fields: model digest, cache domain, salt, layout
    version, adapter (its content digest and `activation`, or an empty field), key of the page
    before (absent for a first page), tokens. Two keys are equal if and only if the fields of their
    pages and of all pages before are equal (barring a SHA-256 collision).

    The adapter acts on positions from `activation` on. Pages wholly before that position have the
    same keys as without an adapter. The keys of later pages depend on `activation`, because the
    same adapter may be activated at another position after the same tokens.
    """

    def __init__(
        self,
        *,
        model: str,
        domain: str,
        adapter: str | None = None,
        activation: int = 0,
        salt: str = "",
        layout: str = "",
    ) -> None:
        shared = (
            _field(b"m", model.encode())
            + _field(b"d", domain.encode())
            + _field(b"s", salt.encode())
            + _field(b"l", layout.encode())
        )
        self._base = self._adapted = hashlib.sha256(shared + _field(b"b", b""))
        self._num_base_pages = 0
        if adapter is not None:
            own = _field(b"a", adapter.encode()) + _field(b"v", str(activation).encode())
            self._adapted = hashlib.sha256(shared + own)
            self._num_base_pages = activation // PAGE_TOKENS

    def key(self, index: int, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Returns the key (32 bytes) of page number `index`. parent: key of the page before, None
        for the first page. tokens: token ids in the page, unsigned 32-bit."""
        state = (self._base if index < self._num_base_pages else self._adapted).copy()
        if parent is not None:
            state.update(_field(b"p", parent))
        state.update(_field(b"t", array("I", tokens).tobytes()))
        return state.digest()

    def extend(self, keys: list[bytes], tokens: Sequence[int], num_pages: int) -> None:
        """Appends the missing keys of the first `num_pages` pages. keys[i] is the key of page i."""
        for index in range(len(keys), num_pages):
            page = tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            keys.append(self.key(index, keys[-1] if keys else None, page))
