"""Model of the duration of a step, learned from previous steps.

seconds = t0 + t1 x tokens + t2 x positions that the tokens attend to
"""

from __future__ import annotations

import math

import numpy as np

MEMORY = 0.995
"""Factor by which each new step reduces the weight of earlier measurements."""
NUM_REMEMBERED = 1 / (1 - MEMORY)
"""Number of steps that are remembered in effect. It is the limit of the sum of all weights, 1 +
MEMORY + MEMORY^2 + ..., if the newest step has weight 1."""
STALE_PART = 1 / 16
"""Fraction of the remembered steps that must be new before the coefficients are computed again.
Computing them takes as long as scheduling a sequence, so it is not done for each step."""
MIN_STEPS = 8
"""Number of measured steps before the first prediction. Fewer steps do not determine the three
coefficients."""
LEAST_PART = 0.5
"""Minimum of a recorded step's seconds, as a part of the predicted seconds. If the end of a step is
seen late, the next one seems to take hardly any time, and its relative error would count most."""
UNITS = np.array([1.0, 1e2, 1e5])
"""Divisor of each feature (steps, tokens, attended positions), so that all features have a similar
size in the equations."""
RIDGE = 1e-9
"""Regularisation of the coefficients towards zero, relative to the largest sum of products. Makes
the solution unique if the measured steps do not determine all coefficients. It is far larger than
the rounding error of a pivot that should be zero."""
RIDGE_OF_ONE = RIDGE * np.eye(3)


class StepTime:
    """Least-squares fit of the durations of steps. It minimises relative errors, so that a step
    that was delayed by another cause has little weight. No coefficient is negative, because more
    work does not take less time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets all measurements."""
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._new: list[tuple[float, float, float]] = []
        """Features of the steps that are not part of `_products` and `_sums` yet."""
        self._num_steps = 0
        self._coefficients = 0.0, 0.0, 0.0

    def record(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Records a step. num_attended: number of earlier positions that a token attends to, summed
        over the step's tokens."""
        if seconds > 0.0:
            seconds = max(seconds, LEAST_PART * self.predict(num_tokens, num_attended))
            self._new.append((1 / seconds, num_tokens / seconds, num_attended / seconds))
            self._num_steps += 1

    def predict(self, num_tokens: float, num_attended: float) -> float:
        """Returns the predicted seconds of a step, or 0 if unknown."""
        return self.total(1, num_tokens, num_attended)

    def total(self, num_steps: float, num_tokens: float, num_attended: float) -> float:
        """Returns the predicted seconds of several steps, or 0 if unknown. num_tokens,
        num_attended: totals of the steps' tokens and of the positions that they attend to."""
        step, token, position = self._solved()
        return step * num_steps + token * num_tokens + position * num_attended

    def seconds_of(self, num_tokens: float, context: float) -> float:
        """Returns the seconds that prompt tokens add to a step if `context` positions precede
        them."""
        _, token, position = self._solved()
        return num_tokens * (token + position * context)

    def tokens_within(self, seconds: float, context: float) -> float:
        """Returns the number of prompt tokens that add at most `seconds` to a step if `context`
        positions precede them."""
        cost = self.seconds_of(1, context)
        return max(seconds, 0.0) / cost if cost > 0.0 else math.inf

    def _solved(self) -> tuple[float, float, float]:
        num_stale = STALE_PART * min(self._num_steps, NUM_REMEMBERED)
        if self._num_steps >= MIN_STEPS and len(self._new) > num_stale:
            self._coefficients = self._solve()
        return self._coefficients

    def _solve(self) -> tuple[float, float, float]:
        """Returns the coefficients. Negative coefficients are set to zero, one at a time."""
        features = np.array(self._new) / UNITS
        weights = MEMORY ** np.arange(len(features))[::-1]
        memory = MEMORY ** len(features)
        self._products = memory * self._products + (weights * features.T) @ features
        self._sums = memory * self._sums + weights @ features
        self._new = []
        # The largest sum of products is on the diagonal, because the product of two different
        # features is at most the larger of their squares.
        matrix, sums = self._products + self._products.max() * RIDGE_OF_ONE, self._sums.copy()
        while (values := np.linalg.solve(matrix, sums)).min() < 0.0:
            fixed = int((values < 0.0).argmax())
            matrix[fixed, :] = matrix[:, fixed] = sums[fixed] = 0.0
            matrix[fixed, fixed] = 1.0
        step, token, position = (values / UNITS).tolist()
        return step, token, position
