"""Counts and histograms as plain numbers, shown by the OpenTelemetry API when something reads it.

A call of an API instrument takes 5 us, for it looks its attributes up under a lock. A tally takes a
fraction of one, and its reader pays for the rest. Each is written by one thread; any may read it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

Labels = tuple[str, ...]
"""Values, in the order of the tally's label names. Each from a bounded set."""
LE = "le"
"""Label of a histogram's `_bucket`: its inclusive upper bound."""
Totals = Mapping[Labels, Sequence[float]]
"""What was counted since the start, by label values: one number, or one for each bucket."""
SPAN_S = 60.0
"""Seconds that `Recent` looks back."""
NUM_LOOKS = 30
"""Looks that are kept of them: the span is longer than asked by one part of this number at most."""


class Exemplar(NamedTuple):
    """One value of a histogram, and the trace that shows where it came from."""

    trace_id: int
    span_id: int
    value: float
    at: float
    """As time.time() has it."""


class Counter:
    """A sum for each combination of label values."""

    def __init__(
        self,
        meter: Meter,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        unit: str = "",
        expected: Iterable[str] = (),
    ) -> None:
        """expected: values of the one label whose series are there from the start, as is that of a
        counter without labels, so that `rate()` sees their first increase too."""
        self._labels = tuple(labels)
        self._values: dict[Labels, float] = {(each,): 0 for each in expected} if labels else {(): 0}
        meter.create_observable_counter(name, [self._observe], unit, description)

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def totals(self) -> Totals:
        return {labels: (value,) for labels, value in list(self._values.items())}

    def _observe(self, _: CallbackOptions) -> Iterator[Observation]:
        # Copied at once: the writer may add a series meanwhile.
        for labels, value in list(self._values.items()):
            yield Observation(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """How many values were at most each bound. Observed as three counters named as Prometheus names
    the parts of a histogram, `_bucket`, `_sum` and `_count`: the API has no instrument that takes
    many values in one call, or that is read when asked."""

    def __init__(
        self,
        meter: Meter,
        name: str,
        description: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        unit: str = "",
        older_name: str | None = None,
    ) -> None:
        """bounds: inclusive upper ones, ascending, without the infinite. older_name: shown too."""
        self.name = name
        self._bounds = tuple(bounds)
        self._names = (*(f"{bound:g}" for bound in bounds), "+Inf")
        self._labels = tuple(labels)
        self._counts: dict[Labels, list[int]] = {}
        """By bucket, not cumulative."""
        self._sums: dict[Labels, float] = {}
        self._exemplars: dict[tuple[Labels, str], Exemplar] = {}
        """The newest of each bucket."""
        for suffix, callback in (
            ("bucket", self._observe_buckets),
            ("sum", self._observe_sums),
            ("count", self._observe_counts),
        ):
            for each in (name, older_name) if older_name else (name,):
                meter.create_observable_counter(
                    f"{each}_{suffix}", [callback], unit if suffix == "sum" else "", description
                )

    def record(self, value: float, *labels: str, count: int = 1) -> None:
        """As often as `count`."""
        counts = self._counts.get(labels)
        if counts is None:
            # Before its counts: a reader takes its series from these.
            self._sums[labels] = 0.0
            counts = self._counts[labels] = [0] * len(self._names)
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def exemplify(self, exemplar: Exemplar, *labels: str) -> None:
        """Keeps a recorded value's trace, in place of the bucket's last."""
        bucket = self._names[bisect_left(self._bounds, exemplar.value)]
        self._exemplars[labels, bucket] = exemplar

    def exemplars(self, attributes: Mapping[str, Any]) -> dict[str, Exemplar]:
        """Exemplars of the series with these attributes, by the bucket's bound."""
        labels = tuple(str(attributes.get(name)) for name in self._labels)
        found = ((name, self._exemplars.get((labels, name))) for name in self._names)
        return {name: exemplar for name, exemplar in found if exemplar is not None}

    def totals(self) -> Totals:
        """By bucket, not cumulative; the last is beyond all bounds."""
        return {labels: tuple(counts) for labels, counts in self._series()}

    def buckets(self, counts: Sequence[float]) -> list[tuple[float, int]]:
        """Upper bounds with their counts, as far as there are any. What is beyond the last bound
        counts as of it."""
        within = [*counts[: len(self._bounds) - 1], sum(counts[len(self._bounds) - 1 :])]
        last = max((place for place, count in enumerate(within) if count), default=-1)
        return [(self._bounds[place], int(within[place])) for place in range(last + 1)]

    def _series(self) -> Iterable[tuple[Labels, list[int]]]:
        return list(self._counts.items())

    def _attributes(self, labels: Labels) -> dict[str, Any]:
        """An empty value is none, as Prometheus has it."""
        pairs = zip(self._labels, labels, strict=True)
        return {name: value for name, value in pairs if value}

    def _observe_buckets(self, _: CallbackOptions) -> Iterator[Observation]:
        for labels, counts in self._series():
            attributes, number = self._attributes(labels), 0
            for name, count in zip(self._names, list(counts), strict=True):
                number += count
                yield Observation(number, attributes | {LE: name})

    def _observe_sums(self, _: CallbackOptions) -> Iterator[Observation]:
        for labels, _counts in self._series():
            yield Observation(self._sums[labels], self._attributes(labels))

    def _observe_counts(self, _: CallbackOptions) -> Iterator[Observation]:
        for labels, counts in self._series():
            yield Observation(sum(list(counts)), self._attributes(labels))


class Tally(Protocol):
    def totals(self) -> Totals: ...


class Recent:
    """What some tallies counted of late. Used by one thread."""

    def __init__(self, *tallies: Tally, clock: Callable[[], float] = time.monotonic) -> None:
        self._tallies = tallies
        self._clock = clock
        self._looks: deque[tuple[float, list[Totals]]] = deque()
        self._look()

    def read(self) -> tuple[float, list[Totals]]:
        """Seconds that it is of, about `SPAN_S` once there were so many, and what each tally
        counted in them, without what it did not."""
        now_s, newest = self._look()
        then_s, oldest = self._looks[0]
        return now_s - then_s, [
            _difference(after, before) for after, before in zip(newest, oldest, strict=True)
        ]

    def _look(self) -> tuple[float, list[Totals]]:
        look = self._clock(), [tally.totals() for tally in self._tallies]
        if not self._looks or look[0] - self._looks[-1][0] >= SPAN_S / NUM_LOOKS:
            self._looks.append(look)
        while len(self._looks) > 1 and look[0] - self._looks[1][0] >= SPAN_S:
            self._looks.popleft()
        return look


def _difference(after: Totals, before: Totals) -> Totals:
    found: dict[Labels, Sequence[float]] = {}
    for labels, values in after.items():
        earlier = before.get(labels, (0,) * len(values))
        if any(old > new for new, old in zip(values, earlier, strict=True)):
            # A series that ended and began again.
            earlier = (0,) * len(values)
        if any(counted := [new - old for new, old in zip(values, earlier, strict=True)]):
            found[labels] = counted
    return found
