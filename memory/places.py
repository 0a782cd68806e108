"""Rows of adjacent bytes that could be cleared for one run, and which costs the least."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple, TypeVar

from memory.runs import Run

SLACK = 1.25
"""A choice so close to the best is good enough, and much quicker."""

T = TypeVar("T")


class Idle(NamedTuple):
    """What could be given up: whose it is, and what its loss costs, in seconds to make it again,
    times its expected reuse."""

    accounts: Collection[str]
    cost_s: float


class Loss(NamedTuple):
    """Orders what could be given up for somebody. turn: of the last of those who lose by it."""

    turn: float
    cost_s: float


NOTHING = Loss(-math.inf, 0.0)
NO_LIMIT = Loss(math.inf, math.inf)


@dataclass(slots=True, eq=False)
class Stretch:
    """Bytes start..end that are free, or would be if their holder gave them up."""

    start: int
    end: int
    loss: Loss = NOTHING
    """For KV with this extent alone, so at least that."""
    run: Run | None = None
    extent: int | None = None

    @property
    def is_held(self) -> bool:
        return self.run is not None or self.extent is not None


def find_places(
    stretches: Sequence[Stretch], num_bytes: int
) -> Iterator[tuple[tuple[int, int], Loss]]:
    """Every shortest row of adjacent stretches that is long enough, the highest first, as the
    (start, stop) of a slice with its loss. stretches: in order."""
    lost = list(accumulate((stretch.loss.cost_s for stretch in stretches), initial=0.0))
    last = len(stretches) - 1
    latest: deque[int] = deque()
    """Stretches of the row whose turn comes later than that of all before them in it."""
    for first in range(len(stretches) - 1, -1, -1):
        if first < last and stretches[first].end != stretches[first + 1].start:
            last = first
            latest.clear()
        while latest and stretches[latest[0]].loss.turn <= stretches[first].loss.turn:
            latest.popleft()
        latest.appendleft(first)
        start = stretches[first].start
        while stretches[last].start - start >= num_bytes:
            last -= 1
        while latest[-1] > last:
            latest.pop()
        if stretches[last].end - start >= num_bytes:
            turn = stretches[latest[-1]].loss.turn
            yield (first, last + 1), Loss(turn, lost[last + 1] - lost[first])


def cheapest_first(
    bounds: Iterable[tuple[T, Loss]], loss_of: Callable[[T], Loss | None]
) -> Iterator[tuple[Loss, T]]:
    """Items by loss, the costs roughly: none comes before one that costs `SLACK` times less.

    bounds: each loses at least so much; the loss itself is asked for only of those whose turn it
    may be. None: it is not to be had.
    """
    items = [(bound, False, order, item) for order, (item, bound) in enumerate(bounds)]
    heapify(items)
    while items:
        loss, is_exact, order, item = heappop(items)
        if not is_exact:
            exact = loss_of(item)
            if exact is None:
                continue
            loss = exact
        if is_exact or not items or loss <= _with_slack(items[0][0]):
            yield loss, item
        else:
            heappush(items, (loss, True, order, item))


def _with_slack(loss: Loss) -> Loss:
    return Loss(loss.turn, SLACK * loss.cost_s)
