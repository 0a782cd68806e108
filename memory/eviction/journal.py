"""Record of the keys added to and removed from a cache since the last read."""

from __future__ import annotations

from typing import NamedTuple

MAX_CHANGES = 1 << 16


class Changes(NamedTuple):
    added: list[bytes]
    removed: list[bytes]


class Journal:
    """Changes of a set of keys. An addition and a removal of the same key cancel out. At most
    `MAX_CHANGES` changes are kept."""

    def __init__(self) -> None:
        self._is_added: dict[bytes, bool] = {}
        self._is_lost = False

    def add(self, key: bytes) -> None:
        self._note(key, is_added=True)

    def remove(self, key: bytes) -> None:
        self._note(key, is_added=False)

    def take(self) -> Changes | None:
        """Returns the changes since the last call, or None if there were too many to keep."""
        is_added, self._is_added = self._is_added, {}
        if self._is_lost:
            self._is_lost = False
            return None
        return Changes(
            [key for key, added in is_added.items() if added],
            [key for key, added in is_added.items() if not added],
        )

    def _note(self, key: bytes, *, is_added: bool) -> None:
        if self._is_lost:
            return
        if self._is_added.pop(key, is_added) == is_added:
            self._is_added[key] = is_added
        if len(self._is_added) > MAX_CHANGES:
            self._is_added.clear()
            self._is_lost = True
