"""Series of tenants are bounded, and what has no name is counted in `other`."""

from __future__ import annotations

from telemetry.top_use import MAX_KNOWN, MAX_NAMED, RANK_S, TopUse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A TopUse that counts tokens and requests, and what a reader sees of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.use = TopUse([("tokens", ""), ("requests", "")], ("tenant",), self.clock)

    def read(self, name: str = "tokens") -> dict[str, float]:
        place = ("tokens", "requests").index(name)
        return {tenant: sums[place] for (tenant,), sums in self.use.totals().items()}


def test_beyond_the_bound_all_share_one_series_and_nothing_is_lost() -> None:
    watched = Watched()
    for number in range(5000):
        watched.use.add((f"t{number}",), 10, 1)
    tokens = watched.read()
    assert len(tokens) == MAX_NAMED + 1
    assert tokens["t0"] == 10 and tokens["other"] == 10 * (5000 - MAX_NAMED)
    assert sum(watched.read("requests").values()) == 5000


def test_names_go_to_those_that_use_most_but_not_for_a_little_more() -> None:
    watched = Watched()
    for number in range(MAX_NAMED):
        watched.use.add((f"t{number}",), 10, 1)
    watched.use.add(("large",), 1000, 1)
    watched.use.add(("alike",), 15, 1)
    assert "large" not in watched.read()
    watched.clock.now += RANK_S
    before = watched.read()
    assert "large" in before and "alike" not in before and len(before) == MAX_NAMED + 1
    watched.use.add(("large",), 7, 1)
    watched.use.add(("alike",), 1, 1)
    after = watched.read()
    assert after["large"] - before["large"] == 7 and after["other"] - before["other"] == 1


def test_names_that_come_once_take_no_memory() -> None:
    watched = Watched()
    for number in range(3 * MAX_KNOWN):
        watched.use.add((f"t{number}",), 1, 1)
    watched.use.add(("kept",), 10_000, 1)
    watched.clock.now += RANK_S
    assert "kept" in watched.read()
    assert len(watched.use._use) <= MAX_KNOWN  # pyright: ignore[reportPrivateUsage]
