"""Limit on the gaps between tokens that prompts cause."""

from __future__ import annotations

from workers.policies.step_cost import StepTime

MAX_GAP_RATIO = 1.8
MAX_LOST_PART = 1 / 16
"""Part of a step's time that may be lost because generated tokens take longer than as many prompt
tokens, if prompts are always pending. Longer steps would compute hardly more tokens per second."""
SHORT_PART = 0.2
"""Part of recent steps that were stretched at most as much as a typical one."""
CHANGE = 1.02
"""Factor by which a step changes the typical stretch."""
PATIENCE = 512
"""Number of consecutive stretched steps that are not typical after many steps without prompts. Most
prompts end within so many steps."""
NUM_HURRIED = 140
"""Balance (see `GapLimit`) at which steps may be 16 times as long as the ratio allows."""


class GapLimit:
    """Limit on the seconds of steps that have both generating sequences and prompts.

    The *stretch* of a step is its time divided by the time that it would take without prompts. A
    step may be stretched by `max_ratio` more than a typical recent step. As long as some steps have
    no prompts, the typical stretch is 1. If prompts are always pending, stretched steps are
    typical, and steps become longer until hardly any time is lost (`MAX_LOST_PART`). Gaps are then
    longer, but alike. The same applies at once if a prompt will be late while it gets no tokens.
    """

    def __init__(self, step_time: StepTime, *, max_gap_s: float, max_ratio: float) -> None:
        """max_gap_s: maximum seconds of a step, whatever is typical."""
        self._step_time = step_time
        self._max_gap_s = max_gap_s
        self._max_ratio = max_ratio
        self._balance = 0.0
        """Number of recent steps that were stretched more than a typical one, minus the number of
        others times (1 - `SHORT_PART`) / `SHORT_PART`. At least -`PATIENCE`."""

    @property
    def typical(self) -> float:
        """Running quantile of the stretch of recent steps that had generating sequences. Of these
        steps, `SHORT_PART` were stretched less."""
        return CHANGE ** max(self._balance, 0.0)

    def seconds(self, decode_s: float, num_tokens: int) -> float:
        """Returns the maximum seconds of a step whose generating sequences have `num_tokens` tokens
        and alone take `decode_s`, which is 0 if unknown."""
        if not decode_s:
            return self._max_gap_s
        lost_s = decode_s - self._step_time.seconds_of(num_tokens, 0)
        calm_s = self._max_ratio * decode_s
        efficient_s = max(calm_s, lost_s / MAX_LOST_PART)
        return min(calm_s * self.typical, efficient_s, self._max_gap_s)

    def hurry(self) -> None:
        """Lets the next steps be as long as is efficient, because a prompt will be late."""
        self._balance = max(self._balance, NUM_HURRIED)

    def record(self, stretch: float) -> None:
        """Records the predicted stretch of a step that has generating sequences."""
        is_short = stretch <= self.typical
        change = (SHORT_PART - 1) / SHORT_PART if is_short else 1.0
        self._balance = max(self._balance + change, -PATIENCE)
