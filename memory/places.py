"""Rows of adjacent bytes that could be cleared for one run, and which costs the least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import TypeVar

from memory.runs import Run

SLACK = 1.25
"""A choice so close to the best is good enough, and much quicker."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Stretch:
    """Bytes start..end that are free, or would be if their holder gave them up."""

    start: int
    end: int
    cost_s: float = 0.0
    """What is lost with it; for KV with this extent alone, so at least that."""
    run: Run | None = None
    extent: int | None = None

    @property
    def is_held(self) -> bool:
        return self.run is not None or self.extent is not None


def find_places(
    stretches: Sequence[Stretch], num_bytes: int
) -> Iterator[tuple[tuple[int, int], float]]:
    """Every shortest row of adjacent stretches that is long enough, the highest first, as the
    (start, stop) of a slice and the sum of the costs. stretches: in order."""
    lost = list(accumulate((stretch.cost_s for stretch in stretches), initial=0.0))
    last = len(stretches) - 1
    for first in range(len(stretches) - 1, -1, -1):
        if first < last and stretches[first].end != stretches[first + 1].start:
            last = first
        start = stretches[first].start
        while stretches[last].start - start >= num_bytes:
            last -= 1
        if stretches[last].end - start >= num_bytes:
            yield (first, last + 1), lost[last + 1] - lost[first]


def cheapest_first(
    bounds: Iterable[tuple[T, float]], cost_of: Callable[[T], float]
) -> Iterator[tuple[float, T]]:
    """Items by cost, roughly: none comes before one that costs `SLACK` times less.

    bounds: each costs at least so much; the cost itself is asked for only of those whose turn it
    may be.
    """
    items = [(bound, False, order, item) for order, (item, bound) in enumerate(bounds)]
    heapify(items)
    while items:
        cost, is_exact, order, item = heappop(items)
        if not is_exact:
            cost = cost_of(item)
        if is_exact or not items or cost <= SLACK * items[0][0]:
            yield cost, item
        else:
            heappush(items, (cost, True, order, item))
