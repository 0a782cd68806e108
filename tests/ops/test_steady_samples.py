"""Samples of benchmarks are dropped if the machine's speed changed while they were taken."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import Speed
from benchmarks.steady import ATTEMPTS, COLUMNS, Samples, is_steady


def speeds(*rates: float) -> Callable[[], Speed]:
    """Returns a probe that finds these multiply rates, and reads at a hundredth of them."""
    left = iter(rates)
    return lambda: Speed(read=(rate := next(left)) / 100, multiply=rate)


def test_a_change_of_a_third_is_steady_and_more_is_not() -> None:
    slow, fast = Speed(1.0, 200.0), Speed(9.0, 300.0)
    assert is_steady(slow, fast)
    assert is_steady(fast, slow)
    assert not is_steady(Speed(1.0, 199.0), fast)
    assert not is_steady(fast, Speed(1.0, 199.0))


def test_a_dropped_sample_is_taken_again() -> None:
    attempts: list[int] = []

    def measure(attempt: int) -> float:
        attempts.append(attempt)
        return 10.0 + attempt

    samples = Samples()
    samples.take(measure, speeds(900e9, 100e9, 300e9, 400e9))
    samples.take(measure, speeds(500e9, 600e9))
    assert attempts == [0, 1, 0]
    assert samples.values == [11.0, 10.0]
    assert samples.num_dropped == 1
    assert len(COLUMNS) == len(samples.cells())
    assert samples.cells() == ("4.0, 5.0", "400.0, 500.0", "2", "1")


def test_a_sample_is_given_up_after_several_attempts() -> None:
    samples = Samples()
    samples.take(float, speeds(*[100e9, 900e9] * ATTEMPTS))
    assert samples.values == []
    assert samples.cells() == ("", "", "0", str(ATTEMPTS))
