"""Which worker takes a request: one that has the adapter unless much busier; else the idlest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

RESIDENT_TIERS = ("device", "loading", "host")
AFFINITY_SLACK = 8
"""So many more sequences may a worker have and still be preferred for holding the adapter."""


class Candidate(msgspec.Struct, frozen=True):
    """A ready worker that has the base model."""

    load: int
    """Sequences running and waiting there."""
    tier: str | None = None
    """Where it holds the adapter; None: nowhere, or none is asked for."""


def pick(candidates: Sequence[Candidate]) -> int:
    """The index of the best of at least one candidate. Pure."""
    least = min(candidate.load for candidate in candidates)

    def rank(index: int) -> tuple[int, int]:
        candidate = candidates[index]
        is_near = candidate.tier in RESIDENT_TIERS and candidate.load <= least + AFFINITY_SLACK
        return (RESIDENT_TIERS.index(candidate.tier or "") if is_near else 9, candidate.load)

    return min(range(len(candidates)), key=rank)
