"""Search for the place in adapter memory that can be cleared at the least loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple, TypeVar

from memory.allocations import Allocation

SLACK = 1.25
"""Ratio to the lowest cost at which an item is good enough; an exact search takes far longer."""

T = TypeVar("T")


class Idle(NamedTuple):
    """Item that could be evicted. cost_s: seconds to make it again, times its expected reuse."""

    accounts: Collection[str]
    cost_s: float


class Loss(NamedTuple):
    """Sort key of items that could be evicted. priority: eviction priority, the highest of the
    accounts that would lose something."""

    priority: float
    cost_s: float


NOTHING = Loss(-math.inf, 0.0)
NO_LIMIT = Loss(math.inf, math.inf)


@dataclass(slots=True, eq=False)
class Span:
    """Bytes start..end that are free, or would be if their item were evicted."""

    start: int
    end: int
    loss: Loss = NOTHING
    """Loss of this span alone. For KV a lower bound, because evicting pages also evicts their
    descendants elsewhere."""
    run: Allocation | None = None
    extent: int | None = None

    @property
    def is_held(self) -> bool:
        return self.run is not None or self.extent is not None


def find_places(spans: Sequence[Span], num_bytes: int) -> Iterator[tuple[tuple[int, int], Loss]]:
    """Yields every shortest row of adjacent spans with at least `num_bytes`, the highest address
    first, as the (start, stop) of a slice of `spans` with its loss. spans: ordered by address."""
    lost = list(accumulate((span.loss.cost_s for span in spans), initial=0.0))
    last = len(spans) - 1
    latest: deque[int] = deque()
    """Spans of the row whose priority exceeds that of all spans before them in the row."""
    for first in range(len(spans) - 1, -1, -1):
        if first < last and spans[first].end != spans[first + 1].start:
            last = first
            latest.clear()
        while latest and spans[latest[0]].loss.priority <= spans[first].loss.priority:
            latest.popleft()
        latest.appendleft(first)
        start = spans[first].start
        while spans[last].start - start >= num_bytes:
            last -= 1
        while latest[-1] > last:
            latest.pop()
        if spans[last].end - start >= num_bytes:
            priority = spans[latest[-1]].loss.priority
            yield (first, last + 1), Loss(priority, lost[last + 1] - lost[first])


def cheapest_first(
    bounds: Iterable[tuple[T, Loss]], loss_of: Callable[[T], Loss | None]
) -> Iterator[tuple[Loss, T]]:
    """Yields the items in order of loss; the costs may be out of order by a factor of `SLACK`.

    bounds: items with lower bounds of their losses. loss_of: returns an item's exact loss, or None
    if the item cannot be evicted; called only for items that may be next.
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
    return Loss(loss.priority, SLACK * loss.cost_s)
