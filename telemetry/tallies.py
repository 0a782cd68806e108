"""Counters and histograms stored as plain numbers. The OpenTelemetry API reads them when metrics
are collected.

A call of an OpenTelemetry instrument takes 5 us, because it looks up the attributes under a lock.
An update of a counter or histogram of this module (a tally) takes a fraction of a microsecond, and
the reader does the rest of the work. Each tally is written by one thread and may be read by any
thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

Labels = tuple[str, ...]
"""Label values, in the order of the tally's label names. Each value is from a bounded set."""
LE = "le"
"""Label with a bucket's inclusive upper bound, in the `_bucket` series of histograms."""
Totals = Mapping[Labels, Sequence[float]]
"""Counts since the start, by label values. A counter has one number, a histogram one for each
bucket."""
SPAN_S = 60.0
"""Seconds that `Recent` covers."""
NUM_LOOKS = 30
"""Number of intervals into which `Recent` divides `SPAN_S`. `Recent` keeps at most one snapshot of
the counts per interval."""


class Exemplar(NamedTuple):
    """One value recorded in a histogram, with the ids of the trace and span in which it was
    measured."""

    trace_id: int
    span_id: int
    value: float
    at: float
    """Seconds since 1970."""


class Counter:
    """Counter with a sum for each combination of label values."""

    def __init__(
        self,
        meter: Meter,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        unit: str = "",
        expected: Iterable[str] = (),
    ) -> None:
        """`expected` are values of the counter's only label. Their series exist from the start with
        the value 0, so that `rate()` sees their first increase. A counter without labels always has
        its series."""
        self._labels = tuple(labels)
        self._values: dict[Labels, float] = {(each,): 0 for each in expected} if labels else {(): 0}
        meter.create_observable_counter(name, [self._observe], unit, description)

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def totals(self) -> Totals:
        return {labels: (value,) for labels, value in list(self._values.items())}

    def _observe(self, _: CallbackOptions) -> Iterator[Observation]:
        # Iterates over a copy, because the writer may add a series during the iteration.
        for labels, value in list(self._values.items()):
            yield Observation(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """Histogram with the number of values in each bucket and the sum of all values, for each
    combination of label values. It is exported as three counters with the suffixes of a Prometheus
    histogram, `_bucket`, `_sum` and `_count`, because OpenTelemetry's API has no histogram that
    takes many values in one call or is read on demand."""

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
        """`bounds` are inclusive upper bounds, ascending, without infinity. `older_name` is a
        second name under which the histogram is exported."""
        self.name = name
        self._bounds = tuple(bounds)
        self._names = (*(f"{bound:g}" for bound in bounds), "+Inf")
        self._labels = tuple(labels)
        self._counts: dict[Labels, list[int]] = {}
        """Number of values in each bucket, not cumulative."""
        self._sums: dict[Labels, float] = {}
        self._exemplars: dict[tuple[Labels, str], Exemplar] = {}
        """Newest exemplar of each bucket, by label values and the bucket's bound."""
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
        """Records the value `count` times."""
        counts = self._counts.get(labels)
        if counts is None:
            # The sum is set before the counts, because a reader on another thread looks up the sum
            # of each series that has counts.
            self._sums[labels] = 0.0
            counts = self._counts[labels] = [0] * len(self._names)
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def exemplify(self, exemplar: Exemplar, *labels: str) -> None:
        """Stores the trace of a recorded value as the exemplar of the value's bucket."""
        bucket = self._names[bisect_left(self._bounds, exemplar.value)]
        self._exemplars[labels, bucket] = exemplar

    def exemplars(self, attributes: Mapping[str, Any]) -> dict[str, Exemplar]:
        """Returns the exemplars of the series with these attributes, by the bucket's bound."""
        labels = tuple(str(attributes.get(name)) for name in self._labels)
        found = ((name, self._exemplars.get((labels, name))) for name in self._names)
        return {name: exemplar for name, exemplar in found if exemplar is not None}

    def totals(self) -> Totals:
        """Returns the number of values in each bucket, not cumulative. The last bucket has the
        values above all bounds."""
        return {labels: tuple(counts) for labels, counts in self._series()}

    def buckets(self, counts: Sequence[float]) -> list[tuple[float, int]]:
        """Returns the upper bound and count of each bucket, up to the last bucket that is not
        empty. Values above the last bound are counted at the last bound."""
        within = [*counts[: len(self._bounds) - 1], sum(counts[len(self._bounds) - 1 :])]
        last = max((place for place, count in enumerate(within) if count), default=-1)
        return [(self._bounds[place], int(within[place])) for place in range(last + 1)]

    def _series(self) -> Iterable[tuple[Labels, list[int]]]:
        return list(self._counts.items())

    def _attributes(self, labels: Labels) -> dict[str, Any]:
        """Returns the attributes of a series. Omits empty values, because Prometheus treats an
        empty label as absent."""
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
    """Increase of some tallies during about the last `SPAN_S` seconds. Not thread-safe."""

    def __init__(self, *tallies: Tally, clock: Callable[[], float] = time.monotonic) -> None:
        self._tallies = tallies
        self._clock = clock
        self._looks: deque[tuple[float, list[Totals]]] = deque()
        self._look()

    def read(self) -> tuple[float, list[Totals]]:
        """Returns the seconds covered, and each tally's increase in these seconds. The seconds are
        about `SPAN_S`, or fewer soon after the start. Series without an increase are omitted."""
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
            # The series was reset, so it began at 0 again.
            earlier = (0,) * len(values)
        if any(counted := [new - old for new, old in zip(values, earlier, strict=True)]):
            found[labels] = counted
    return found
