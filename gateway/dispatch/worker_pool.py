"""A few workers drawn of many, in a time that does not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from random import Random
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)
"""Whatever tells workers apart."""

NUM_DRAWN = 2
"""Workers drawn of each kind."""
NUM_TRIES = 16
"""To draw one that can be used; after that all of its kind are looked at."""


class Pool(Generic[W]):
    """Workers to draw from. Each operation takes the same time however many there are."""

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
        """The last one takes its place."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        last = self._members.pop()
        if place < len(self._members):
            self._members[place] = last
            self._places[last] = place

    def draw(self, is_able: Callable[[W], bool], random: Random) -> Sequence[W]:
        """As `draw`, of those that are able. None only if none is."""
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
    """Up to two, perhaps the same one twice; in random order, for the first of equals is picked."""
    if len(kind) <= NUM_DRAWN:
        return kind if random.random() < 0.5 else kind[::-1]
    return [kind[int(random.random() * len(kind))] for _ in range(NUM_DRAWN)]
