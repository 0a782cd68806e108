"""How much of a soak or chaos test is run: its short form in the suite, the full one by `make soak`
and `make chaos`."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("LORAPLEX_TEST_SCALE") == "full"


def scaled(short: int, full: int) -> int:
    """The number this run uses."""
    return full if IS_FULL else short
