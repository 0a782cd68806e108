"""Identity of a full KV page: what must be equal for one sequence to reuse another's page."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

PAGE_TOKENS = 16
"""Tokens in a page, as the op backends have it."""


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


class PageHasher:
    """Keys of the pages that one model computes with one adapter (or none) for one cache domain.

    key = SHA-256 over tagged, length-prefixed fields: model digest, cache domain, adapter content
    digest or base, salt, layout version, parent key (absent for a first page), tokens. The adapter
    is a field of each page's key: a sequence may chain pages of one hasher to those of another.
    Equal keys mean equal fields all the way up (to a SHA-256 collision), and the reverse.
    """

    def __init__(
        self,
        *,
        model: str,
        domain: str,
        adapter: str | None = None,
        salt: str = "",
        layout: str = "",
    ) -> None:
        self._state = hashlib.sha256(
            _field(b"m", model.encode())
            + _field(b"d", domain.encode())
            + (_field(b"b", b"") if adapter is None else _field(b"a", adapter.encode()))
            + _field(b"s", salt.encode())
            + _field(b"l", layout.encode())
        )

    def key(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Key of the page with these tokens (unsigned 32-bit) after the page `parent`."""
        state = self._state.copy()
        if parent is not None:
            state.update(_field(b"p", parent))
        state.update(_field(b"t", array("I", tokens).tobytes()))
        return state.digest()

    def extend(self, keys: list[bytes], tokens: Sequence[int]) -> None:
        """Appends the keys of the full pages of `tokens` that have none yet; keys[i] is page
        i's."""
        for index in range(len(keys), len(tokens) // PAGE_TOKENS):
            page = tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            keys.append(self.key(keys[-1] if keys else None, page))


def page_keys(hasher: PageHasher, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all full pages of the tokens."""
    keys: list[bytes] = []
    hasher.extend(keys, tokens)
    return keys
