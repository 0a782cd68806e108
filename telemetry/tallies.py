"""Counters, histograms and gauges of a process.

Each is a collector of `prometheus_client`, in the registry PAGE unless said otherwise. The page
/metrics and the sender of OTLP read the registries. A call of an instrument of `prometheus_client`
or of OpenTelemetry takes 4 to 7 us, because it looks up labels and takes a lock. An update of a
counter or histogram of this module (a tally) takes a fraction of a microsecond, and the reader does
the rest of the work. Each tally is written by one thread and may be read by any thread.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

log = logging.getLogger(__name__)

Labels = tuple[str, ...]
"""Label values, in the order of the tally's label names. Each value is from a bounded set."""
LE = "le"
"""Label with a bucket's inclusive upper bound, in the `_bucket` samples of histograms."""
Figures = Iterable[tuple[float, Mapping[str, str]]]
"""Values of one metric, each with its labels."""
Totals = Mapping[Labels, Sequence[float]]
"""Counts since the start, by label values. A counter has one number, a histogram one for each
bucket."""
PAGE = CollectorRegistry()
"""Metrics that are on the page /metrics and that are sent over OTLP."""
OTLP_ALONE = CollectorRegistry()
"""Metrics that are only sent over OTLP. Their unit is seconds."""
SPAN_S = 60.0
"""Seconds that `Recent` covers."""
NUM_LOOKS = 30
"""Number of intervals into which `Recent` divides `SPAN_S`. `Recent` keeps at most one snapshot of
the counts per interval."""


class Counter(Collector):
    """Counter with a sum for each combination of label values."""

    def __init__(
        self, name: str, description: str, labels: Sequence[str] = (), expected: Iterable[str] = ()
    ) -> None:
        """`expected` are values of the counter's only label. Their series exist from the start with
        the value 0, so that `rate()` sees their first increase. A counter without labels always has
        its series."""
        self._name, self._description = name, description
        self._labels = tuple(labels)
        self._values: dict[Labels, float] = {(each,): 0 for each in expected} if labels else {(): 0}
        PAGE.register(self)

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def totals(self) -> Totals:
        return {labels: (value,) for labels, value in list(self._values.items())}

    def collect(self) -> Iterator[Metric]:
        figures = (
            (value, dict(zip(self._labels, labels, strict=True)))
            for labels, (value,) in self.totals().items()
        )
        yield counter_family(self._name, self._description, figures)


class Histogram(Collector):
    """Histogram with the number of values in each bucket and the sum of all values, for each
    combination of label values. One call may record many equal values."""

    def __init__(
        self,
        name: str,
        description: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        *,
        older_name: str | None = None,
        registry: CollectorRegistry = PAGE,
    ) -> None:
        """`bounds` are inclusive upper bounds, ascending, without infinity. `older_name` is a
        second name under which the histogram is shown."""
        self._names = (name, older_name) if older_name else (name,)
        self._description = description
        self._bounds = tuple(bounds)
        self._bound_names = (*(f"{bound:g}" for bound in bounds), "+Inf")
        self._labels = tuple(labels)
        self._counts: dict[Labels, list[int]] = {}
        """Number of values in each bucket, not cumulative."""
        self._sums: dict[Labels, float] = {}
        self._exemplars: dict[tuple[Labels, str], Exemplar] = {}
        """Newest exemplar of each bucket, by label values and the bucket's bound."""
        registry.register(self)

    def record(self, value: float, *labels: str, count: int = 1) -> None:
        """Records the value `count` times."""
        counts = self._counts.get(labels)
        if counts is None:
            # The sum is set before the counts, because a reader on another thread looks up the sum
            # of each series that has counts.
            self._sums[labels] = 0.0
            counts = self._counts[labels] = [0] * len(self._bound_names)
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def exemplify(self, exemplar: Exemplar, *labels: str) -> None:
        """Stores the trace of a recorded value as the exemplar of the value's bucket."""
        bucket = self._bound_names[bisect_left(self._bounds, exemplar.value)]
        self._exemplars[labels, bucket] = exemplar

    def totals(self) -> Totals:
        """Returns the number of values in each bucket, not cumulative. The last bucket has the
        values above all bounds."""
        return {labels: tuple(counts) for labels, counts in list(self._counts.items())}

    def buckets(self, counts: Sequence[float]) -> list[tuple[float, int]]:
        """Returns the upper bound and count of each bucket, up to the last bucket that is not
        empty. Values above the last bound are counted at the last bound."""
        within = [*counts[: len(self._bounds) - 1], sum(counts[len(self._bounds) - 1 :])]
        last = max((place for place, count in enumerate(within) if count), default=-1)
        return [(self._bounds[place], int(within[place])) for place in range(last + 1)]

    def collect(self) -> Iterator[Metric]:
        for name in self._names:
            family = Metric(name, self._description, "histogram")
            for labels, counts in self.totals().items():
                # Empty values are omitted, because Prometheus treats an empty label as absent.
                pairs = zip(self._labels, labels, strict=True)
                series = {label: value for label, value in pairs if value}
                number = 0
                for bound, number in zip(self._bound_names, accumulate(counts), strict=True):
                    exemplar = self._exemplars.get((labels, bound))
                    family.add_sample(
                        f"{name}_bucket", {**series, LE: bound}, number, exemplar=exemplar
                    )
                family.add_sample(f"{name}_sum", series, self._sums[labels])
                family.add_sample(f"{name}_count", series, number)
            yield family


def exemplar(trace_id: int, span_id: int, value: float, at: float) -> Exemplar:
    """Returns an exemplar, which links a recorded value to a span. `at` is in seconds since
    1970."""
    return Exemplar({"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}, value, at)


class Gauge(Collector):
    """Metric whose values are read whenever metrics are collected. If reading them fails, the
    metric has no values, and other metrics keep theirs."""

    def __init__(self, name: str, description: str, read: Callable[[], Figures]) -> None:
        self._name, self._description, self._read = name, description, read
        PAGE.register(self)

    def collect(self) -> Iterator[Metric]:
        family = Metric(self._name, self._description, "gauge")
        for value, labels in self._figures():
            family.add_sample(self._name, dict(labels), value)
        yield family

    def _figures(self) -> Figures:
        try:
            return list(self._read())
        except Exception:  # for example, a dict that another thread changed meanwhile
            log.exception("reading the metric %s failed", self._name)
            return ()


class ReadCounter(Gauge):
    """Counter whose values are read whenever metrics are collected."""

    def collect(self) -> Iterator[Metric]:
        yield counter_family(self._name, self._description, self._figures())


def counter_family(name: str, description: str, figures: Figures) -> Metric:
    family = Metric(name, description, "counter")
    for value, labels in figures:
        family.add_sample(f"{name}_total", dict(labels), value)
    return family


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
