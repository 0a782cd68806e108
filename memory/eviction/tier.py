"""Sizes of the items in a storage tier of limited size, and the choice of items to drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from memory.errors import require

K = TypeVar("K")


class Tier(Generic[K]):
    """Sizes of the items in a tier, by key. The tier holds at most `max_bytes` bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._sizes: dict[K, int] = {}

    def __iter__(self) -> Iterator[K]:
        """Iterates over the keys, the oldest item first."""
        return iter(self._sizes)

    def newest(self) -> Iterator[K]:
        """Iterates over the keys, the newest item first."""
        return reversed(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def put(self, key: K, num_bytes: int) -> None:
        """Adds the item, replacing an item with the same key. The caller must drop items first if
        there is no room (see `victims`)."""
        self.drop(key)
        self._sizes[key] = num_bytes
        self.num_bytes += num_bytes

    def drop(self, key: K) -> None:
        """Removes the item if it is present."""
        self.num_bytes -= self._sizes.pop(key, 0)

    def size(self, key: K) -> int:
        """Returns the size in bytes of a present item."""
        return self._sizes[key]

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more bytes fit without dropping an item."""
        return self.num_bytes + num_bytes <= self.max_bytes

    def victims(
        self,
        num_bytes: int,
        worth: Callable[[K], Any],
        *,
        gives_way: Callable[[K, Any], bool] = lambda _key, _worth: True,
    ) -> list[K] | None:
        """Returns the items to drop so that `num_bytes` more bytes fit, in ascending order of
        worth. Returns None if too few may be dropped.

        worth: function that returns the cost per byte of dropping an item, as any comparable value,
        for example the seconds to load the item again times its expected reuse. gives_way: function
        of an item and its worth that returns whether the item may be dropped.

        If possible, the items free a little more than needed (1/128 of `max_bytes`), so that not
        every load has to search for items to drop.
        """
        if self.has_room(num_bytes):
            return []
        missing = self.num_bytes + num_bytes - self.max_bytes
        wanted = missing + self.max_bytes // 128
        victims: list[K] = []
        worths = [(worth(key), key) for key in self._sizes]
        for value, key in sorted(worths, key=lambda each: each[0]):
            if wanted <= 0:
                break
            if gives_way(key, value):
                victims.append(key)
                missing -= self._sizes[key]
                wanted -= self._sizes[key]
        return victims if missing <= 0 else None

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the sizes of the tier's items add up to `num_bytes`, and
        `num_bytes` is at most `max_bytes`."""
        num_bytes = sum(self._sizes.values())
        require(num_bytes == self.num_bytes, f"{num_bytes} bytes in the tier, not {self.num_bytes}")
        require(num_bytes <= self.max_bytes, f"{num_bytes} bytes of {self.max_bytes}")
