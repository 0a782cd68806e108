"""How many rows of prompts may join a step that others wait for."""

from __future__ import annotations

from workers.step_time import StepTime

MIN_ROWS = 64
"""Of prompts in every step, whoever is late: or else they would never be computed under load."""


class StepBudget:
    """seconds: that prompts may take, so that no token of the step is late; num_rows: at most."""

    def __init__(self, step_time: StepTime, *, num_rows: int, seconds: float) -> None:
        self.num_rows = num_rows
        self._step_time = step_time
        self._seconds = seconds
        self._floor = MIN_ROWS

    def room(self, context: int) -> int:
        """Rows left for a prompt that has `context` tokens computed; at least one while `num_rows`
        is."""
        within = self._step_time.rows_within(self._seconds, context)
        return int(min(self.num_rows, max(within, self._floor, 1)))

    def take(self, num_rows: int, context: int) -> None:
        """When time or rows are used up, `num_rows` is 0."""
        self._seconds -= self._step_time.seconds_of(num_rows, context)
        self._floor -= num_rows
        self.num_rows -= num_rows
        if self._floor <= 0 and self._seconds <= 0.0:
            self.num_rows = 0
