"""A count that fades, and how many of them are kept."""

from __future__ import annotations

from memory.reuse import HALF_LIFE_S, MAX_KEYS, Reuse, ReuseByKey


def test_a_use_counts_half_after_a_half_life_and_can_be_taken_back() -> None:
    reuse = Reuse()
    reuse.note(100.0)
    assert reuse.expected(100.0 + 2 * HALF_LIFE_S) == 0.25
    reuse.note(100.0 + HALF_LIFE_S)
    assert reuse.expected(100.0 + HALF_LIFE_S) == 1.5
    reuse.note(100.0 + HALF_LIFE_S, -9.0)
    assert reuse.expected(1e9) == 0.0


def test_the_key_asked_for_longest_ago_is_forgotten_when_they_are_too_many() -> None:
    now = 0.0
    reuse = ReuseByKey(lambda: now)
    for number in range(MAX_KEYS):
        reuse.of(str(number)).note(now)
    reuse.of("0").note(now)
    reuse.of("one more").note(now)
    assert reuse.expected("1") == 0.0 and reuse.expected("0") == 2.0
    assert reuse.expected("one more") == 1.0
