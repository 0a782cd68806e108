"""What a step takes is learned from any steps, however quick and however alike."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from workers.policies.step_cost import StepTime

seconds = st.floats(1e-9, 1e3)
steps = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 10**6), seconds), min_size=8)


@given(steps)
@example([(1, 7, 1e-6)] * 8)
@example([(1, 0, 3e-8), (2, 0, 7e-8)] * 40)
def test_any_steps_give_a_prediction(noted: list[tuple[int, int, float]]) -> None:
    learned = StepTime()
    for num_tokens, num_attended, took_s in noted:
        learned.record(num_tokens, num_attended, took_s)
    for num_tokens, num_attended, _ in noted:
        predicted = learned.predict(num_tokens, num_attended)
        assert math.isfinite(predicted) and predicted >= 0.0
    assert learned.tokens_within(1.0, 100) >= 0.0


@given(seconds, st.integers(1, 512), st.integers(0, 10**6))
def test_what_always_takes_as_long_is_predicted_so(
    took_s: float, num_tokens: int, num_attended: int
) -> None:
    learned = StepTime()
    for _ in range(20):
        learned.record(num_tokens, num_attended, took_s)
    assert math.isclose(learned.predict(num_tokens, num_attended), took_s, rel_tol=1e-3)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_what_tokens_and_positions_add_is_told_apart(
    step_s: float, token_share: float, position_share: float
) -> None:
    token_s, position_s = step_s * token_share / 100, step_s * position_share / 1e5
    learned = StepTime()
    work = [(1 + 7 * i % 97, 1000 * (1 + 31 * i % 89)) for i in range(200)]
    for num_tokens, num_attended in work:
        learned.record(
            num_tokens, num_attended, step_s + token_s * num_tokens + position_s * num_attended
        )
    for num_tokens, num_attended in work:
        exact = step_s + token_s * num_tokens + position_s * num_attended
        assert math.isclose(learned.predict(num_tokens, num_attended), exact, rel_tol=1e-3)


def test_a_step_that_is_measured_too_short_makes_no_token_free() -> None:
    """If the end of a step is seen late, the next one seems to take hardly any time."""
    learned = StepTime()
    for number in range(200):
        num_tokens = 500 if number % 10 == 0 else 8
        learned.record(num_tokens, 0, 0.01 + 5e-5 * num_tokens)
    learned.record(2000, 0, 0.5)
    learned.record(2000, 0, 0.001)
    for _ in range(12):
        learned.record(8, 0, 0.0104)
    assert learned.seconds_of(1000, 0) > 0.04
