"""Gateway's estimate of the prompt tokens that a worker has cached. Does not import torch.

A worker reports which pages were added to and removed from its prefix caches. The first bytes of a
page's key identify the page. Cache domain, adapter and salt are hashed into the key, so a prompt
matches only pages of its own domain. A wrong estimate never changes an answer, because a worker
reuses a page only if the whole key is equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memory.page_key import PAGE_TOKENS, PageHasher
from workers.wire.frames import CachedPages
from workers.wire.protocol import Generate

KEY_BYTES = 8
MAX_KEYS = 1 << 16
"""Maximum number of keys per frame."""


class Prefix:
    """Prompt of a request, with the keys of its pages, which are computed when first needed."""

    def __init__(self, request: Generate) -> None:
        self.tokens = request.tokens
        self.model = request.model
        self._request = request
        self._hashers: dict[str, PageHasher] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._first: dict[str, bytes] = {}

    def first_key(self, layout: str) -> bytes:
        """Returns the first `KEY_BYTES` bytes of the key of the prompt's first full page, or b"" if
        the prompt has no full page."""
        first = self._first.get(layout)
        if first is None:
            first = self._first[layout] = next(self.keys(layout), b"")
        return first

    def keys(self, layout: str) -> Iterator[bytes]:
        """Yields the first `KEY_BYTES` bytes of the key of each full page of the prompt, in
        order."""
        hasher, known = self._hasher(layout), self._keys[layout]
        for index in range(len(self.tokens) // PAGE_TOKENS):
            if index == len(known):
                page = self.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
                known.append(hasher.key(index, known[-1] if known else None, page))
            yield known[index][:KEY_BYTES]

    def _hasher(self, layout: str) -> PageHasher:
        hasher = self._hashers.get(layout)
        if hasher is None:
            self._keys[layout] = []
            hasher = self._hashers[layout] = self._request.page_hasher(layout)
        return hasher


class PrefixIndex:
    """Keys of the prefix-cache pages of one worker. The number of keys is bounded by the worker's
    number of pages."""

    def __init__(self) -> None:
        self._keys: dict[str, set[bytes]] = {}

    def apply(self, pages: CachedPages) -> None:
        keys = self._keys.setdefault(pages.model, set())
        if pages.is_whole:
            keys.clear()
        keys.difference_update(_split(pages.removed))
        keys.update(_split(pages.added))

    def num_cached(self, prefix: Prefix, layout: str) -> int:
        """Returns the number of tokens at the start of the prompt that the worker has cached.
        layout: name of the worker's layout of KV pages."""
        keys = self._keys.get(prefix.model)
        # Checks the first page separately, because most workers lack it, and there may be
        # thousands of workers.
        if not keys or prefix.first_key(layout) not in keys:
            return 0
        num_pages = 0
        for key in prefix.keys(layout):
            if key not in keys:
                break
            num_pages += 1
        return num_pages * PAGE_TOKENS

    def whole(self) -> Iterator[CachedPages]:
        """Yields frames with all cached keys. A worker sends these frames to a gateway that has
        just connected."""
        for model, keys in self._keys.items():
            yield from changed_pages(model, keys, (), is_whole=True)


def changed_pages(
    model: str, added: Iterable[bytes], removed: Iterable[bytes], *, is_whole: bool = False
) -> Iterator[CachedPages]:
    """Yields frames that report added and removed keys. Each frame has at most `MAX_KEYS` added and
    at most `MAX_KEYS` removed keys."""
    come, gone = list(added), list(removed)
    for start in range(0, max(len(come), len(gone), is_whole), MAX_KEYS):
        end = start + MAX_KEYS
        is_first = start == 0
        yield CachedPages(
            model, _join(come[start:end]), _join(gone[start:end]), is_whole and is_first
        )


def _join(keys: Iterable[bytes]) -> bytes:
    return b"".join(key[:KEY_BYTES] for key in keys)


def _split(keys: bytes) -> Iterator[bytes]:
    return (keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES))
