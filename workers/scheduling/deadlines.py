"""Until when the first tokens of waiting sequences are wanted."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from workers.scheduling.sequence import Sequence

MIN_KEPT = 64
"""Below this many, those that have ended are kept until their time comes."""


class Deadlines:
    """A heap by time. Sequences that have begun or ended since are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_added = 0

    def add(self, sequence: Sequence, num_live: int) -> None:
        """num_live: how many may be here that have not ended. There are never more than twice as
        many."""
        if sequence.request.timeout_s is None:
            return
        self._num_added += 1
        heappush(self._heap, (sequence.expires_s, self._num_added, sequence))
        if len(self._heap) > 2 * num_live + MIN_KEPT:
            self._heap = [each for each in self._heap if not each[2].is_finished]
            heapify(self._heap)

    def take_passed(self, now: float) -> list[Sequence]:
        """Sequences whose time is over and that still wait for a first token."""
        passed: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heappop(self._heap)[2]
            if sequence.is_waiting and sequence.num_generated == 0:
                passed.append(sequence)
        return passed
