"""A count that fades, and its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memory.reuse import HALF_LIFE_S, MAX_KEYS, Reuse, ReuseByKey

EVENTS = st.lists(
    st.tuples(st.floats(0.0, 600.0), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=8
)


def test_a_use_counts_half_after_a_half_life_and_can_be_taken_back() -> None:
    reuse = Reuse()
    reuse.note(100.0)
    assert reuse.expected(100.0 + 2 * HALF_LIFE_S) == 0.25
    reuse.note(100.0 + HALF_LIFE_S)
    assert reuse.expected(100.0 + HALF_LIFE_S) == 1.5
    reuse.note(100.0 + HALF_LIFE_S, -9.0)
    assert reuse.expected(1e9) == 0.0


@given(EVENTS, EVENTS)
def test_the_rank_orders_as_the_expected_reuse_does_at_any_time(
    one: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    first, second = Reuse(), Reuse()
    for reuse, events in ((first, one), (second, other)):
        now = 0.0
        for pause, amount in events:
            now += pause
            reuse.note(now, amount)
    for now in (5000.0, 6000.0):
        a, b = first.expected(now), second.expected(now)
        if a > b * (1 + 1e-9):
            assert first.rank > second.rank


def test_the_least_used_keys_are_forgotten_when_they_are_too_many() -> None:
    now = 0.0
    reuse = ReuseByKey(lambda: now)
    for number in range(MAX_KEYS):
        reuse.of(str(number)).note(now, 1.0 + number % 2)
    reuse.of("one more").note(now)
    assert reuse.expected("0") == 0.0 and reuse.expected("1") == 2.0
    assert reuse.expected("one more") == 1.0
