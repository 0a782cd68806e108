"""Adapters as the broker sees them: runs with a cost, some in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memory.allocations import AdapterAllocations, Allocation
from memory.page_key import PageHasher
from memory.places import Idle


class IdleRuns:
    """costs: of the idle runs. awaited: those among them that somebody is about to lease."""

    def __init__(self, runs: AdapterAllocations) -> None:
        self._runs = runs
        self.costs: dict[Allocation, float] = {}
        self.awaited: set[Allocation] = set()
        self.in_use: dict[Allocation, float] = {}

    def idle_runs(self, *, with_awaited: bool) -> Mapping[Allocation, Idle]:
        hidden = set() if with_awaited else self.awaited
        return {
            run: Idle((self._runs.account_of(run),), cost)
            for run, cost in self.costs.items()
            if run not in hidden
        }

    def evict(self, run: Allocation) -> None:
        del self.costs[run]
        self.awaited.discard(run)
        self._runs.free(run)

    def go_idle(self, index: int, *, is_awaited: bool) -> None:
        run = list(self.in_use)[index % len(self.in_use)]
        self.costs[run] = self.in_use.pop(run)
        if is_awaited:
            self.awaited.add(run)

    def lease(self, index: int) -> None:
        run = list(self.costs)[index % len(self.costs)]
        self.in_use[run] = self.costs.pop(run)
        self.awaited.discard(run)


def num_runs(runs: AdapterAllocations) -> int:
    return len({run for found in runs.by_extent().values() for run in found})


def page_keys(hasher: PageHasher, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all full pages of the tokens."""
    keys: list[bytes] = []
    hasher.extend(keys, tokens)
    return keys
