"""Counts use by name for the tenants or adapters with the most use. All others share one series."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from heapq import nlargest
from threading import Lock

from telemetry.tallies import Figures, ReadCounter, Totals

OTHER = "other"
MAX_NAMED = 100
MAX_KNOWN = 10 * MAX_NAMED
"""Maximum number of tenants or adapters whose recent use is remembered. If there are more, the half
with the lowest recent use is forgotten."""
RANK_S = 60.0
"""Seconds between rankings. Each ranking halves the remembered use."""


class TopUse:
    """Counters with a bounded number of series: up to `MAX_NAMED` with the name of a tenant or an
    adapter, and one with the name `other`.

    Use counts for the name if the name has a series at that moment. Otherwise it counts for
    `other`, so that rates sum to the total. A name loses its series only to a name with more than
    twice its use, so that names with similar use do not alternate. Its series then ends, and begins
    at 0 if the name gets a series again.
    """

    def __init__(
        self,
        counters: Sequence[tuple[str, str]],
        labels: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counters` are the metric name and description for each of the amounts passed to `add`,
        in the same order. Names are ranked by the sum of all their amounts, which is mostly tokens
        if one of the amounts counts tokens."""
        self._labels = tuple(labels)
        self._clock = clock
        self._lock = Lock()
        self._named: dict[tuple[str, ...], list[float]] = {}
        self._other = [0.0] * len(counters)
        self._use: dict[tuple[str, ...], float] = {}
        self._ranked_s = clock()
        for index, (name, description) in enumerate(counters):
            ReadCounter(name, description, partial(self._figures, index))

    def add(self, key: tuple[str, ...], *amounts: float) -> None:
        """Adds amounts to the counters of one name. `key` has the values of the labels."""
        with self._lock:
            self._use[key] = self._use.get(key, 0.0) + sum(amounts)
            totals = self._named.get(key)
            if totals is None:
                totals = self._other
                if len(self._named) < MAX_NAMED:
                    totals = self._named[key] = [0.0] * len(amounts)
            for index, amount in enumerate(amounts):
                totals[index] += amount
            if len(self._use) > MAX_KNOWN:
                self._use = dict(nlargest(MAX_KNOWN // 2, self._use.items(), lambda it: it[1]))

    def _rank(self) -> None:
        if self._clock() - self._ranked_s < RANK_S:
            return
        self._ranked_s = self._clock()
        use = self._use
        # A name keeps its series until another name has twice its use, so that names do not
        # alternate.
        weighted = {key: (2 if key in self._named else 1) * value for key, value in use.items()}
        named = nlargest(MAX_NAMED, weighted, key=weighted.__getitem__)
        self._named = {key: self._named.get(key) or [0.0] * len(self._other) for key in named}
        self._use = {key: value / 2 for key, value in use.items() if value >= 1e-3}

    def totals(self) -> Totals:
        """Returns the sums of all amounts by name, including `other`."""
        with self._lock:
            self._rank()
            found = {key: tuple(sums) for key, sums in self._named.items()}
            return found | {(OTHER,) * len(self._labels): tuple(self._other)}

    def _figures(self, index: int) -> Figures:
        for key, sums in self.totals().items():
            yield sums[index], dict(zip(self._labels, key, strict=True))
