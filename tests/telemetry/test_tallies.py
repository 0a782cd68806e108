"""What tallies counted of late."""

from __future__ import annotations

from telemetry.tallies import SPAN_S, Counter, Histogram, Recent, Totals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_the_last_minute_counts() -> None:
    clock, counter = Clock(), Counter("c", "", ("kind",))
    counter.add(5, "old")
    recent = Recent(counter, clock=clock)
    for second in range(1, 100):
        clock.now = float(second)
        counter.add(1, "each")
        seconds, (counted,) = recent.read()
        (number,) = counted["each",]
        assert number == round(seconds) and seconds <= SPAN_S + 3
        assert counted.keys() == {("each",)}
    assert seconds >= SPAN_S


def test_a_series_that_began_again_counts_from_zero() -> None:
    class Series:
        def __init__(self) -> None:
            self.value = 7.0

        def totals(self) -> Totals:
            return {("a",): (self.value,)}

    clock, series = Clock(), Series()
    recent = Recent(series, clock=clock)
    clock.now, series.value = 10.0, 2.0
    assert recent.read() == (10.0, [{("a",): [2.0]}])


def test_buckets_end_with_the_last_that_has_any() -> None:
    histogram = Histogram("h", "", (1.0, 2.0, 4.0))
    assert histogram.buckets(()) == []
    histogram.record(1.5)
    assert histogram.buckets(histogram.totals()[()]) == [(1.0, 0), (2.0, 1)]
    histogram.record(9.0)
    assert histogram.buckets(histogram.totals()[()]) == [(1.0, 0), (2.0, 1), (4.0, 1)]
