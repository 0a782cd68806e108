"""Seconds that it takes to bring an adapter one tier nearer: what its loss there costs.

Measured on one CPU core.
"""

from __future__ import annotations

OVERHEAD_S = 1e-3
COPY_BYTES_PER_S = 2.5e9
FETCH_BYTES_PER_S = 2e9
BUILD_BYTES_PER_S = 1.2e8


def copy_s(num_bytes: int) -> float:
    """Host to device."""
    return OVERHEAD_S + num_bytes / COPY_BYTES_PER_S


def fetch_s(num_bytes: int) -> float:
    """Cached image to host."""
    return OVERHEAD_S + num_bytes / FETCH_BYTES_PER_S


def build_s(num_bytes: int) -> float:
    """Store to cached image: read, checked and packed."""
    return OVERHEAD_S + num_bytes / BUILD_BYTES_PER_S
