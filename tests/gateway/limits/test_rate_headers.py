"""Times as callers are told them."""

from __future__ import annotations

import pytest

from gateway.limits.rate_headers import duration


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-1.0, "0ms"),
        (0.0, "0ms"),
        (0.25, "250ms"),
        (0.2501, "251ms"),
        (1.0, "1s"),
        (11.2, "12s"),
        (59.2, "1m0s"),
        (360.0, "6m0s"),
        (3599.0, "59m59s"),
        (3599.5, "1h0m0s"),
        (3725.0, "1h2m5s"),
        (90061.0, "25h1m1s"),
    ],
)
def test_a_duration_is_written_as_openai_writes_it(seconds: float, told: str) -> None:
    assert duration(seconds) == told
