from __future__ import annotations

from workers.wire.recent_refusals import MAX_REMEMBERED, REMEMBERED_S, RecentRefusals


def test_a_refusal_is_remembered_for_a_while() -> None:
    now = 100.0
    refusals: RecentRefusals[str] = RecentRefusals(lambda: now)
    refusals.remember(b"a", "why")
    assert (refusals.find(b"a"), refusals.find(b"b")) == ("why", None)
    now += REMEMBERED_S - 1
    assert refusals.find(b"a") == "why"
    now += 1
    assert refusals.find(b"a") is None
    refusals.remember(b"a", "again")
    assert refusals.find(b"a") == "again"


def test_the_oldest_are_forgotten_first() -> None:
    refusals: RecentRefusals[int] = RecentRefusals()
    for number in range(MAX_REMEMBERED + 1):
        refusals.remember(b"%d" % number, number)
    assert refusals.find(b"0") is None and refusals.find(b"1") == 1
