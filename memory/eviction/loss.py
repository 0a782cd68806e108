"""Items that may be evicted, and their order by the cost of losing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from memory.accounts import Ask

SLACK = 1.25
"""Maximum ratio of the chosen item's cost to the lowest cost. Finding the exact minimum takes far
longer."""


class Idle(NamedTuple):
    """Cost of evicting an idle item. accounts: accounts that lose something. cost_s: seconds to
    make the item again, times its expected reuse."""

    accounts: Collection[str]
    cost_s: float


class Loss(NamedTuple):
    """Sort key of items that may be evicted. priority: highest eviction priority of the accounts
    that would lose something. cost_s: cost of the loss, in seconds per byte."""

    priority: float
    cost_s: float


NO_LIMIT = Loss(math.inf, math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Idle adapter, or extent that can be freed. exact: function that computes the cost of evicting
    the item. lost: lower bound of the cost. For an extent of pages, the lower bound omits pages in
    other extents that must be evicted, too, because they follow the extent's pages."""

    num_bytes: int
    lost: Idle
    exact: Callable[[], Idle]
    evict: Callable[[], None]

    def loss_per_byte(self, lost: Idle, ask: Ask) -> Loss:
        return Loss(ask.priority(*lost.accounts), lost.cost_s / self.num_bytes)


def by_loss(items: Iterable[Item], ask: Ask) -> Iterator[tuple[Loss, Item]]:
    """Yields the items in order of their loss per byte. Costs may be out of order by a factor of up
    to `SLACK`. Computes the exact loss only of items that may be next."""
    heap = [
        (item.loss_per_byte(item.lost, ask), False, order, item) for order, item in enumerate(items)
    ]
    heapify(heap)
    while heap:
        loss, is_exact, order, item = heappop(heap)
        if not is_exact:
            loss = item.loss_per_byte(item.exact(), ask)
        if is_exact or not heap or loss <= _with_slack(heap[0][0]):
            yield loss, item
        else:
            heappush(heap, (loss, True, order, item))


def _with_slack(loss: Loss) -> Loss:
    return Loss(loss.priority, SLACK * loss.cost_s)
