"""The bound of a tier, and which items leave for another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memory.eviction.tier import Tier

SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=30)


@given(arrivals=SIZES, losses=st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_the_bound_holds_and_the_cheapest_leave(
    arrivals: list[tuple[int, int]], losses: list[int]
) -> None:
    tier = Tier[int](100)
    for key, num_bytes in arrivals:
        tier.drop(key)
        victims = tier.victims(num_bytes, losses.__getitem__)
        assert victims is not None, "all give way"
        kept = [losses[other] for other in tier if other not in victims]
        assert all(losses[victim] <= least for victim in victims for least in kept)
        for victim in victims:
            tier.drop(victim)
        tier.put(key, num_bytes)
        tier.check_integrity()
        assert key in tier and tier.size(key) == num_bytes


@given(held=st.sets(st.integers(0, 5)), missing=st.integers(1, 60))
def test_what_does_not_give_way_stays(held: set[int], missing: int) -> None:
    tier = Tier[int](60)
    for key in range(6):
        tier.put(key, 10)
    victims = tier.victims(missing, lambda key: key, gives_way=lambda key, _worth: key not in held)
    free = 10 * (6 - len(held))
    assert (victims is None) == (free < missing)
    assert not held & set(victims or ())
