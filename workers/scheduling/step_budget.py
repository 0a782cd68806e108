"""How many rows of prompts may join a step that others wait for."""

from __future__ import annotations

from workers.scheduling.step_cost import StepTime

MIN_ROWS = 64
"""Of prompts in every step, whoever is late: or else they would never be computed under load."""
GUEST_PART = 0.4
"""Of the time that a step would take without prompts and guests: with their rows in it, prompts of
guests add no more."""


class StepBudget:
    """num_rows: of prompts, at most; decode_s: what the step takes already, and without the guests'
    rows, infinity where nobody generates; seconds: that it may take, so that no token is late."""

    def __init__(
        self,
        step_time: StepTime,
        *,
        num_rows: int,
        decode_s: float,
        without_guests_s: float,
        seconds: float,
    ) -> None:
        self.num_rows = num_rows
        self._step_time = step_time
        self._seconds = seconds - decode_s
        self._guest_s = (1 + GUEST_PART) * without_guests_s - decode_s
        self._floor = MIN_ROWS

    def is_spent(self, *, is_guest: bool) -> bool:
        """No prompt gets rows any more."""
        is_late = is_guest and self._floor <= 0 and self._guest_s <= 0.0
        return self.num_rows <= 0 or is_late

    def room(self, context: int, *, is_guest: bool) -> int:
        """Rows left for a prompt that has `context` tokens computed, at least one: unless it is
        spent."""
        seconds = min(self._seconds, self._guest_s) if is_guest else self._seconds
        within = self._step_time.tokens_within(seconds, context)
        return int(min(self.num_rows, max(within, self._floor, 1)))

    def take(self, num_rows: int, context: int) -> None:
        """When time or rows are used up, `num_rows` is 0."""
        seconds = self._step_time.seconds_of(num_rows, context)
        self._seconds -= seconds
        self._guest_s -= seconds
        self._floor -= num_rows
        self.num_rows -= num_rows
        if self._floor <= 0 and self._seconds <= 0.0:
            self.num_rows = 0
