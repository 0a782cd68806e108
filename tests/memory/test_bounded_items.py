"""The bound of a store, and which items leave for another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memory.bounded_items import BoundedItems

SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=30)


@given(arrivals=SIZES, losses=st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_the_bound_holds_and_the_cheapest_leave(
    arrivals: list[tuple[int, int]], losses: list[int]
) -> None:
    items = BoundedItems[int](100, losses.__getitem__)
    for key, num_bytes in arrivals:
        items.drop(key)
        victims = items.victims(num_bytes)
        assert victims is not None, "all give way"
        kept = [losses[other] / items.size(other) for other in items if other not in victims]
        left = [losses[victim] / items.size(victim) for victim in victims]
        assert max(left, default=0) <= min(kept, default=9)
        for victim in victims:
            items.drop(victim)
        items.put(key, num_bytes)
        items.check_integrity()
        assert key in items and items.size(key) == num_bytes


@given(held=st.sets(st.integers(0, 5)), missing=st.integers(1, 60))
def test_what_does_not_give_way_stays(held: set[int], missing: int) -> None:
    items = BoundedItems[int](60, float)
    for key in range(6):
        items.put(key, 10)
    victims = items.victims(missing, may_go=lambda key: key not in held)
    free = 10 * (6 - len(held))
    assert (victims is None) == (free < missing)
    assert not held & set(victims or ())
