"""Draws a few workers from many in constant time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from random import Random
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)
"""Any hashable type that identifies workers."""

NUM_DRAWN = 2
"""Number of workers drawn from each pool."""
NUM_TRIES = 16
"""Maximum number of random draws of able workers. After that, all workers of the pool are
checked."""


class Pool(Generic[W]):
    """Set of workers from which random ones are drawn. Each operation takes constant time, unless
    `draw` finds few able workers."""

    def __init__(self) -> None:
        self._members: list[W] = []
        self._places: dict[W, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[W]:
        return iter(self._members)

    def add(self, worker: W) -> None:
        if worker not in self._places:
            self._places[worker] = len(self._members)
            self._members.append(worker)

    def discard(self, worker: W) -> None:
        """Removes a worker. The last worker of the list takes its position."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        last = self._members.pop()
        if place < len(self._members):
            self._members[place] = last
            self._places[last] = place

    def draw(self, is_able: Callable[[W], bool], random: Random) -> Sequence[W]:
        """Draws up to two workers for which `is_able` is true. Returns an empty list only if there
        are none."""
        members = self._members
        if not members:
            return []
        if len(members) > NUM_DRAWN:
            drawn: list[W] = []
            for _ in range(NUM_TRIES):
                worker = members[int(random.random() * len(members))]
                if is_able(worker):
                    drawn.append(worker)
                    if len(drawn) == NUM_DRAWN:
                        return drawn
        return draw([worker for worker in members if is_able(worker)], random)


def draw(kind: Sequence[W], random: Random) -> Sequence[W]:
    """Draws up to two workers in random order, because callers choose the first of equally good
    ones. The two may be the same worker."""
    if len(kind) <= NUM_DRAWN:
        return kind if random.random() < 0.5 else kind[::-1]
    return [kind[int(random.random() * len(kind))] for _ in range(NUM_DRAWN)]
