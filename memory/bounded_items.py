"""Items of a bounded store. Those whose loss costs least are evicted first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from memory.errors import require

K = TypeVar("K")


class BoundedItems(Generic[K]):
    """Sizes of the items of a store that holds at most `max_bytes` bytes, by key, the oldest item
    first. Of items whose loss costs the same per byte, the oldest is evicted first."""

    def __init__(self, max_bytes: int, loss_s: Callable[[K], float]) -> None:
        """loss_s: function that returns the cost of evicting an item: the seconds to load it again,
        times its expected reuse."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._loss_s = loss_s
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

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more bytes fit without dropping an item."""
        return self.num_bytes + num_bytes <= self.max_bytes

    def loss(self, key: K, num_bytes: int) -> float:
        """Returns the cost per byte of evicting an item of `num_bytes` bytes."""
        return self._loss_s(key) / max(num_bytes, 1)

    def size(self, key: K) -> int:
        """Returns the size in bytes of a present item."""
        return self._sizes[key]

    def victims(
        self,
        num_bytes: int,
        *,
        rank: Callable[[K], Any] = lambda _: 0,
        may_go: Callable[[K], bool] = lambda _: True,
    ) -> list[K] | None:
        """Returns the items to drop so that `num_bytes` more bytes fit, in ascending order of the
        cost of their loss per byte. Returns None if too few may be dropped.

        rank: function that returns a comparable value; items of lower rank are dropped before all
        others. may_go: function that returns whether an item may be dropped.

        If possible, the items free a little more than needed (1/128 of `max_bytes`), so that not
        every load has to search for items to drop.
        """
        if self.has_room(num_bytes):
            return []
        missing = self.num_bytes + num_bytes - self.max_bytes
        wanted = missing + self.max_bytes // 128
        victims: list[K] = []
        for key in sorted(
            filter(may_go, self._sizes), key=lambda key: (rank(key), self.loss(key, self.size(key)))
        ):
            if wanted <= 0:
                break
            victims.append(key)
            missing -= self._sizes[key]
            wanted -= self._sizes[key]
        return victims if missing <= 0 else None

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the sizes of the items add up to `num_bytes`, and
        `num_bytes` is at most `max_bytes`."""
        num_bytes = sum(self._sizes.values())
        require(num_bytes == self.num_bytes, f"{num_bytes} bytes, not {self.num_bytes}")
        require(num_bytes <= self.max_bytes, f"{num_bytes} bytes of {self.max_bytes}")
