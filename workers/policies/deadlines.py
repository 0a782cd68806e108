"""Deadlines for the first tokens of waiting sequences."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from workers.scheduling.sequence import Sequence

MIN_KEPT = 64
"""Number of entries below which ended sequences are kept until their deadline."""


class Deadlines:
    """Heap of deadlines. Sequences that have started or ended are dropped at their deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_added = 0

    def add(self, sequence: Sequence, num_live: int) -> None:
        """Adds the deadline of a sequence that has a timeout. num_live: upper bound of the
        unfinished sequences here; the heap has at most about twice as many entries."""
        if sequence.request.timeout_s is None:
            return
        self._num_added += 1
        heappush(self._heap, (sequence.expires_s, self._num_added, sequence))
        if len(self._heap) > 2 * num_live + MIN_KEPT:
            self._heap = [each for each in self._heap if not each[2].is_finished]
            heapify(self._heap)

    def take_passed(self, now: float) -> list[Sequence]:
        """Removes and returns sequences whose deadline for the first token has passed."""
        passed: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heappop(self._heap)[2]
            if sequence.is_waiting and sequence.num_generated == 0:
                passed.append(sequence)
        return passed
