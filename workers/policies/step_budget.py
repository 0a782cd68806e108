"""Budget of prompt tokens for a step that generating sequences wait for."""

from __future__ import annotations

import math

from workers.policies.step_cost import StepTime

MIN_TOKENS = 64
MIN_PART = 0.25
"""Prompt tokens guaranteed in every step, even if tokens are late, because otherwise no prompt is
computed under load: MIN_TOKENS, as far as the maximum gap between tokens has room for them, or as
many as take MIN_PART of the time of the generating sequences alone."""


class StepBudget:
    """Budget of one step.

    num_tokens: maximum number of prompt tokens. decode_s: predicted seconds of the step so far.
    over_share_s: maximum duration with prompts of over-share tenants. seconds: duration up to which
    no token is late. max_gap_s: duration up to which no gap between two tokens is too long, however
    early the previous tokens were.
    """

    def __init__(
        self,
        step_time: StepTime,
        *,
        num_tokens: int,
        decode_s: float,
        over_share_s: float,
        seconds: float,
        max_gap_s: float = math.inf,
    ) -> None:
        self.num_tokens = num_tokens
        self._step_time = step_time
        self._seconds = min(seconds, max_gap_s) - decode_s
        self._over_share_s = over_share_s - decode_s
        floor_s = max(max_gap_s - decode_s, MIN_PART * decode_s)
        self._floor = int(max(min(MIN_TOKENS, step_time.tokens_within(floor_s, 0)), 1))

    def is_spent(self, *, is_over_share: bool) -> bool:
        """Whether no tokens are left for prompts of tenants over (or within) their share."""
        is_late = is_over_share and self._floor <= 0 and self._over_share_s <= 0.0
        return self.num_tokens <= 0 or is_late

    def room(self, context: float, *, is_over_share: bool) -> int:
        """Returns the tokens left for a prompt with `context` tokens computed: at least one, unless
        the budget is spent."""
        seconds = min(self._seconds, self._over_share_s) if is_over_share else self._seconds
        within = self._step_time.tokens_within(seconds, context)
        return int(min(self.num_tokens, max(within, self._floor, 1)))

    def deduct(self, num_tokens: int, context: int) -> None:
        """Deducts tokens from the budget. Sets `num_tokens` to 0 once the time is used up."""
        seconds = self._step_time.seconds_of(num_tokens, context)
        self._seconds -= seconds
        self._over_share_s -= seconds
        self._floor -= num_tokens
        self.num_tokens -= num_tokens
        if self._floor <= 0 and self._seconds <= 0.0:
            self.num_tokens = 0
