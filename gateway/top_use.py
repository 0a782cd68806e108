"""Sums for the tenants or adapters that use most, by name; all others share one series."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import nlargest
from threading import Lock

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from workers.tallies import Totals

OTHER = "other"
MAX_NAMED = 100
MAX_KNOWN = 10 * MAX_NAMED
"""Candidates for a name: beyond them those that used least of late are forgotten."""
RANK_S = 60.0
"""Seconds between two looks at which use most; each halves what was used before."""


class TopUse:
    """Counters whose series are bounded: `MAX_NAMED` with a name, and `other`.

    A use counts for the name if it has one at that moment, else for `other`: rates add up to all
    there is. A name is lost only to others that use more than twice as much, so that two that use
    about the same do not take turns; its series ends then, and begins at 0 if it comes back.
    """

    def __init__(
        self,
        meter: Meter,
        counters: Sequence[tuple[str, str]],
        labels: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """counters: name and description of each amount that `add` takes, in their order. They are
        ranked by the sum of all amounts: where one is of tokens, by tokens for the most part."""
        self._labels = tuple(labels)
        self._clock = clock
        self._lock = Lock()
        self._named: dict[tuple[str, ...], list[float]] = {}
        self._other = [0.0] * len(counters)
        self._use: dict[tuple[str, ...], float] = {}
        self._ranked_s = clock()
        for index, (name, description) in enumerate(counters):
            callback = partial(self._observe, index)
            meter.create_observable_counter(name, [callback], description=description)

    def add(self, key: tuple[str, ...], *amounts: float) -> None:
        """Values of the labels, and what was used."""
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
        # A name holder counts twice.
        weighted = {key: (2 if key in self._named else 1) * value for key, value in use.items()}
        named = nlargest(MAX_NAMED, weighted, key=weighted.__getitem__)
        self._named = {key: self._named.get(key) or [0.0] * len(self._other) for key in named}
        self._use = {key: value / 2 for key, value in use.items() if value >= 1e-3}

    def totals(self) -> Totals:
        """The amounts by name, and those of `other`."""
        with self._lock:
            self._rank()
            found = {key: tuple(sums) for key, sums in self._named.items()}
            return found | {(OTHER,) * len(self._labels): tuple(self._other)}

    def _observe(self, index: int, _: CallbackOptions) -> Iterator[Observation]:
        for key, sums in self.totals().items():
            yield Observation(sums[index], dict(zip(self._labels, key, strict=True)))
