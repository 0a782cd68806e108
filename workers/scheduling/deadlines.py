"""Deadlines of waiting sequences for their first token."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from workers.scheduling.sequence import Sequence

MIN_KEPT = 64
"""Number of entries that `Deadlines` may have, in addition to twice the number of unfinished
sequences, before it removes sequences that have ended."""


class Deadlines:
    """Heap of the deadlines of sequences. A sequence that has started or ended stays in the heap
    until its deadline, unless there are many entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_added = 0

    def add(self, sequence: Sequence, num_live: int) -> None:
        """Adds the deadline of the sequence if it has a timeout. num_live: upper bound of the
        number of unfinished sequences. If the heap has more than about twice this number of
        entries, ended sequences are removed."""
        if sequence.request.timeout_s is None:
            return
        self._num_added += 1
        heappush(self._heap, (sequence.expires_s, self._num_added, sequence))
        if len(self._heap) > 2 * num_live + MIN_KEPT:
            self._heap = [each for each in self._heap if not each[2].is_finished]
            heapify(self._heap)

    def pop_passed(self, now: float) -> list[Sequence]:
        """Removes the entries whose deadline has passed. Returns their sequences, except sequences
        that are not waiting or have generated a token."""
        passed: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heappop(self._heap)[2]
            if sequence.is_waiting and sequence.num_generated == 0:
                passed.append(sequence)
        return passed
