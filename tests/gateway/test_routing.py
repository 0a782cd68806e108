"""Which worker is picked."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import AFFINITY_SLACK, Candidate, pick

candidates = st.lists(
    st.builds(
        Candidate,
        load=st.integers(0, 50),
        tier=st.sampled_from([None, "disk", "host", "loading", "device"]),
    ),
    min_size=1,
    max_size=6,
)


def test_the_idlest_without_an_adapter() -> None:
    assert pick([Candidate(3), Candidate(1), Candidate(2)]) == 1


def test_the_holder_before_the_idlest() -> None:
    assert pick([Candidate(0), Candidate(5, "host"), Candidate(7, "device")]) == 2


def test_a_hot_adapter_spreads() -> None:
    busy = Candidate(AFFINITY_SLACK + 1, "device")
    assert pick([busy, Candidate(0, "disk")]) == 1


@given(candidates)
def test_never_much_busier_than_the_idlest(candidates: list[Candidate]) -> None:
    chosen = candidates[pick(candidates)]
    assert chosen.load <= min(c.load for c in candidates) + AFFINITY_SLACK
