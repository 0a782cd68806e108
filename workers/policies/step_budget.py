"""Budget of prompt tokens for a step, limited so that generated tokens are on time."""

from __future__ import annotations

import math

from workers.policies.step_cost import StepTime

MIN_TOKENS = 64
"""Number of prompt tokens that a step may have even if generated tokens are late. Without it, no
prompt would be computed under load. The number is smaller if these prompt tokens would take longer
than both the maximum gap between two tokens and `MIN_PART` allow."""
MIN_PART = 0.25
"""Time that a step may spend on `MIN_TOKENS` prompt tokens, even if this exceeds the maximum gap
between two tokens, as a fraction of the predicted time of its generating sequences."""


class StepBudget:
    """Budget of one step.

    - num_tokens: maximum number of prompt tokens.
    - decode_s: predicted seconds of the step with generating sequences alone.
    - over_share_s: maximum seconds of the step if it has prompts of over-share tenants.
    - seconds: maximum seconds of the step so that no generated token is late.
    - max_gap_s: maximum seconds of the step so that no gap between two tokens is too long, even if
      the earlier tokens were early.
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
        """Whether no tokens are left for a prompt. is_over_share: whether the prompt's tenant is
        over its share."""
        is_late = is_over_share and self._floor <= 0 and self._over_share_s <= 0.0
        return self.num_tokens <= 0 or is_late

    def room(self, context: float, *, is_over_share: bool) -> int:
        """Returns the number of tokens left for a prompt of which `context` tokens are computed. It
        is at least 1 unless the budget is spent."""
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
