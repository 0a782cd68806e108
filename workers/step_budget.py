"""How many rows of prompts may join a step that others wait for."""

from __future__ import annotations

import math
from typing import NamedTuple

from workers.step_time import StepTime

MIN_ROWS = 64
"""Of prompts in every step, whoever is late: or else they would never be computed under load."""
GUEST_PART = 0.4
"""Of the time that a step would take without prompts and guests: with their rows in it, prompts of
guests add no more."""


class Load(NamedTuple):
    """Rows, and the positions that they attend to."""

    num_rows: int
    num_attended: int


class StepBudget:
    """num_rows: of prompts, at most; decoding: what is in the step already; without_guests: and
    is no guest's; seconds: that the step may take, so that no token is late."""

    def __init__(
        self,
        step_time: StepTime,
        *,
        num_rows: int,
        decoding: Load,
        without_guests: Load,
        seconds: float,
    ) -> None:
        self.num_rows = num_rows
        self._step_time = step_time
        decode_s = step_time.predict(*decoding)
        self._seconds = seconds - decode_s
        limit_s = (1 + GUEST_PART) * step_time.predict(*without_guests)
        self._guest_s = limit_s - decode_s if decoding.num_rows else math.inf
        self._floor = MIN_ROWS

    def is_spent(self, *, is_guest: bool) -> bool:
        """No prompt gets rows any more."""
        is_late = is_guest and self._floor <= 0 and self._guest_s <= 0.0
        return self.num_rows <= 0 or is_late

    def room(self, context: int, *, is_guest: bool) -> int:
        """Rows left for a prompt that has `context` tokens computed, at least one: unless it is
        spent."""
        seconds = min(self._seconds, self._guest_s) if is_guest else self._seconds
        within = self._step_time.rows_within(seconds, context)
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
