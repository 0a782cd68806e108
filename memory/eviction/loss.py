"""Items that may be evicted, and their order by what is lost with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from memory.accounts import Ask

SLACK = 1.25
"""Ratio to the lowest cost at which an item is good enough; an exact search takes far longer."""


class Idle(NamedTuple):
    """Accounts that lose something by an eviction. cost_s: seconds to make the item again, times
    its expected reuse."""

    accounts: Collection[str]
    cost_s: float


class Loss(NamedTuple):
    """Sort key of items that could be evicted. priority: eviction priority, the highest of the
    accounts that would lose something."""

    priority: float
    cost_s: float


NO_LIMIT = Loss(math.inf, math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Idle adapter, or extent that can be freed. lost: a lower bound of `exact`, because pages
    elsewhere may follow those of an extent."""

    num_bytes: int
    lost: Idle
    exact: Callable[[], Idle]
    evict: Callable[[], None]

    def loss_per_byte(self, lost: Idle, ask: Ask) -> Loss:
        return Loss(ask.priority(*lost.accounts), lost.cost_s / self.num_bytes)


def by_loss(items: Iterable[Item], ask: Ask) -> Iterator[tuple[Loss, Item]]:
    """Yields the items in order of their loss per byte; the costs may be out of order by a factor
    of `SLACK`. The exact losses are determined only of items that may be next."""
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
