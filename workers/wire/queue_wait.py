"""Estimate of the wait for a slot of a worker. Workers refuse requests by it and tell clients when
to try again, and gateways choose workers by it."""

from __future__ import annotations

ASSUMED_ANSWER_TOKENS = 64.0
"""Number of tokens of an answer, assumed until a worker has measured it."""


def slot_wait_s(num_behind: float, num_slots: float, answer_s: float) -> float:
    """Returns the seconds until `num_behind` requests for which no slot is free have one. By
    Little's law, they wait for rounds of `answer_s` seconds, in which the sequence of each slot
    ends."""
    return num_behind / num_slots * answer_s if num_behind > 0 and num_slots else 0.0
