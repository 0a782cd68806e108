"""Estimated seconds to load an adapter from one tier to the next. The cost of an eviction is the
time of the loads that undo the eviction. Measured on one CPU core."""

from __future__ import annotations

OVERHEAD_S = 1e-3
COPY_BYTES_PER_S = 2.5e9
FETCH_BYTES_PER_S = 2e9
BUILD_BYTES_PER_S = 1.2e8


def copy_s(num_bytes: int) -> float:
    """Returns the seconds to copy an image from host to device."""
    return OVERHEAD_S + num_bytes / COPY_BYTES_PER_S


def fetch_s(num_bytes: int) -> float:
    """Returns the seconds to read a cached image to the host."""
    return OVERHEAD_S + num_bytes / FETCH_BYTES_PER_S


def build_s(num_bytes: int) -> float:
    """Returns the seconds to build a cached image from the store: read, check and pack."""
    return OVERHEAD_S + num_bytes / BUILD_BYTES_PER_S
