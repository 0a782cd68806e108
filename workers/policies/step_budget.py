"""Budget of prompt tokens for a step, limited so that generated tokens are on time."""

from __future__ import annotations

import math

from workers.policies.step_cost import StepTime

MIN_TOKENS = 64
"""Number of prompt tokens that a step may have even if generated tokens are late. Without it, no
prompt would be computed under load. Prompt tokens with many positions before them, which take
longer, may have only the time that this number takes at the start of a prompt. The time is shorter
if it would exceed both the maximum gap between two tokens and what `MIN_PART` allows."""
ROUNDING = 0.01
"""Part of a token by which a number of tokens may be rounded up."""
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
        self._decode_s = decode_s
        self._seconds = min(seconds, max_gap_s) - decode_s
        self._over_share_s = over_share_s - decode_s
        floor_s = max(max_gap_s - decode_s, MIN_PART * decode_s)
        self._floor_s = min(step_time.seconds_of(MIN_TOKENS, 0), floor_s)
        self._prompt_s = 0.0

    @property
    def stretch(self) -> float:
        """Predicted seconds of the step with its prompts so far, divided by `decode_s`, or 1 if
        unknown."""
        return 1.0 + self._prompt_s / self._decode_s if self._decode_s else 1.0

    def is_spent(self, *, is_over_share: bool) -> bool:
        """Whether no tokens are left for a prompt. is_over_share: whether the prompt's tenant is
        over its share."""
        is_late = is_over_share and self._floor_s <= 0.0 and self._over_share_s <= 0.0
        return self.num_tokens <= 0 or is_late

    def room(self, context: float, *, is_over_share: bool) -> int:
        """Returns the number of tokens left for a prompt of which `context` tokens are computed. It
        is at least 1 unless the budget is spent."""
        seconds = min(self._seconds, self._over_share_s) if is_over_share else self._seconds
        within = self._step_time.tokens_within(max(seconds, self._floor_s), context)
        return int(min(self.num_tokens, max(within + ROUNDING, 1)))

    def deduct(self, num_tokens: int, context: int) -> None:
        """Deducts tokens from the budget. Sets `num_tokens` to 0 if the time left is too short for
        another one, so that no prompt starts with a single token."""
        seconds = self._step_time.seconds_of(num_tokens, context)
        self._prompt_s += seconds
        self._seconds -= seconds
        self._over_share_s -= seconds
        self._floor_s -= seconds
        self.num_tokens -= num_tokens
        if self._step_time.tokens_within(max(self._seconds, self._floor_s), 0) < 1 - ROUNDING:
            self.num_tokens = 0
