"""Retries are a tenth of what is sent, over any window, and a few in any case."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.failover import FLOOR, SHARE, WINDOW_S, RetryBudget


def test_a_quiet_gateway_may_retry_a_little_and_again_a_window_later() -> None:
    now = 100.5
    budget = RetryBudget(lambda: now)
    assert [budget.take() for _ in range(FLOOR + 1)] == [True] * FLOOR + [False]
    assert not budget.has_room
    now += WINDOW_S
    assert budget.has_room and budget.take()


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2000), st.integers(0, 300))))
def test_it_gives_what_the_whole_history_allows(story: list[tuple[float, int, int]]) -> None:
    now = 0.0
    budget = RetryBudget(lambda: now)
    sent: list[tuple[int, int]] = []
    retried: list[int] = []
    for pause_s, num_sent, num_wanted in story:
        now += pause_s
        first = int(now) - WINDOW_S + 1
        budget.note_sent(num_sent)
        sent.append((int(now), num_sent))
        room = max(FLOOR, SHARE * sum(num for second, num in sent if second >= first))
        retried = [second for second in retried if second >= first]
        for _ in range(num_wanted):
            may_retry = len(retried) < room
            assert budget.has_room == may_retry == budget.take()
            if may_retry:
                retried.append(int(now))
