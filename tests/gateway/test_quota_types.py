"""Which limits there are, their windows, and the bits that say which of them a request took of."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.quota_types import Kind, Limit, Span, leased_bits, limits_of, window
from store.records import Quota


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("span", "at", "start", "end"),
    [
        (Span.MINUTE, "2026-02-28T23:59:59.9", "2026-02-28T23:59", "2026-03-01T00:00"),
        (Span.DAY, "2026-02-28T23:59:59.9", "2026-02-28", "2026-03-01"),
        (Span.DAY, "2024-02-28T13:14:15", "2024-02-28", "2024-02-29"),
        (Span.MONTH, "2026-01-31T13:14:15", "2026-01-01", "2026-02-01"),
        (Span.MONTH, "2026-02-01T00:00", "2026-02-01", "2026-03-01"),
        (Span.MONTH, "2026-12-31T23:59:59.9", "2026-12-01", "2027-01-01"),
    ],
)
def test_a_window_is_one_of_the_calendar(span: Span, at: str, start: str, end: str) -> None:
    found = window(span, moment(at))
    assert found == (moment(start), moment(end))
    assert found.holds(found.start) and found.holds(moment(at)) and not found.holds(found.end)
    assert window(span, found.end).start == found.end
    assert found.name == f"{datetime.fromisoformat(start).isoformat()}+00:00"


def test_what_is_of_all_times_never_ends() -> None:
    found = window(Span.ALWAYS, 0.0)
    assert found.name == "-infinity" and found.holds(1e12)


def test_a_limit_of_nothing_is_a_limit() -> None:
    quota = Quota("ten_a", requests_per_minute=0, tokens_per_day=5)
    assert limits_of(quota) == (
        Limit("ten_a", Kind.REQUESTS_PER_MINUTE, 0),
        Limit("ten_a", Kind.TOKENS_PER_DAY, 5),
    )


def test_each_budget_has_its_bit_and_a_key_others_than_its_tenant() -> None:
    """As usage_load reads them."""
    kinds = (Kind.TOKENS_PER_DAY, Kind.TOKENS_PER_MONTH, Kind.SPEND_PER_DAY, Kind.SPEND_PER_MONTH)
    for subject, first in (("ten_a", 0), ("key", 4)):
        for place, kind in enumerate(kinds, first):
            assert leased_bits("ten_a", [Limit(subject, kind, 9)]) == 1 << place
    both = [Limit("ten_a", kinds[0], 1), Limit("key", kinds[3], 1)]
    assert leased_bits("ten_a", [*both, Limit("key", Kind.TOKENS_PER_MINUTE, 1)]) == 0b1000_0001
