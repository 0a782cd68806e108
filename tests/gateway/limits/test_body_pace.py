"""Large bodies of a tenant are worked on one after the other. No other tenant waits for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.tenant_load import BYTES_PER_S, LARGE, BodyPace

MIB = 1 << 20


class Setup:
    """A pace with a clock that goes on only as the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pace = BodyPace(lambda: self.now)


def test_each_waits_for_those_before_it() -> None:
    setup, mib_s = Setup(), MIB / BYTES_PER_S
    delays = [setup.pace.delay_s("a", MIB) for _ in range(4)]
    assert delays == pytest.approx([0, mib_s, 2 * mib_s, 3 * mib_s])
    assert setup.pace.delay_s("b", MIB) == setup.pace.delay_s("a", LARGE - 1) == 0
    setup.now += 3.5 * mib_s
    assert setup.pace.delay_s("a", LARGE) == pytest.approx(0.5 * mib_s)
    setup.now += 10.0
    assert setup.pace.delay_s("a", 10 * MIB) == 0


@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(LARGE, 10 * MIB)), max_size=40))
def test_between_two_bodies_there_is_time_for_all_that_begin_before_the_second(
    bodies: list[tuple[float, int]],
) -> None:
    setup = Setup()
    begun: list[tuple[float, int]] = []
    for pause_s, num_bytes in bodies:
        setup.now += pause_s
        begun.append((setup.now + setup.pace.delay_s("a", num_bytes), num_bytes))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            within_s = begun[last][0] - begun[first][0]
            assert sum(size for _, size in begun[first:last]) <= within_s * BYTES_PER_S + 1
