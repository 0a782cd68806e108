"""Token buckets: what a bucket gives over any time, and which of many buckets are forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from web.token_buckets import TokenBuckets


@given(
    capacity_s=st.floats(1.0, 60.0),
    takes=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 10.0)), max_size=60),
)
def test_a_bucket_gives_its_capacity_and_what_it_regains(
    capacity_s: float, takes: list[tuple[float, float]]
) -> None:
    now = 1000.0
    buckets = TokenBuckets(capacity_s, clock=lambda: now)
    has_s = capacity_s
    for pause_s, amount_s in takes:
        now += pause_s
        has_s = min(has_s + pause_s, capacity_s)
        wait_s = buckets.take("a", amount_s)
        assert wait_s == pytest.approx(max(amount_s - has_s, 0.0), abs=1e-5)
        if not wait_s:
            has_s -= amount_s
        assert buckets.missing_s("a") == pytest.approx(capacity_s - has_s, abs=1e-5)
        assert not buckets.missing_s("b")


def test_a_bucket_can_be_charged_more_than_it_has() -> None:
    now = 0.0
    buckets = TokenBuckets(2.0, clock=lambda: now)
    buckets.charge("a", 5.0)
    assert buckets.take("a", 1.0) == pytest.approx(4.0)
    now = 4.0
    assert not buckets.take("a", 1.0)


def test_of_too_many_buckets_the_emptiest_are_kept() -> None:
    buckets = TokenBuckets(100.0, max_keys=10, clock=lambda: 0.0)
    buckets.charge("owes", 50.0)
    for number in range(1000):
        buckets.charge(str(number), 1.0)
        assert len(buckets) <= 10
    assert buckets.missing_s("owes") == 50.0
