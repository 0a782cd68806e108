"""Model of the duration of a step, learned from previous steps.

seconds = t0 + t1 x tokens + t2 x positions that the tokens attend to
"""

from __future__ import annotations

import math

MEMORY = 0.995
"""Factor by which each new step reduces the weight of earlier measurements."""
MIN_STEPS = 8
"""Steps to measure before the first prediction. Fewer do not determine three coefficients."""
UNITS = (1.0, 1e2, 1e5)
"""Scale of each coefficient, so that all three are near one."""
RIDGE = 1e-9
"""Regularisation towards zero, as a fraction of the largest product. Divides between the
coefficients what the steps do not determine. Far above the rounding error of a zero pivot."""


class StepTime:
    """Least squares of the relative error, so that a step delayed by something else has little
    weight. No coefficient is negative, because more work does not take less time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets all measurements."""
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._num_steps = 0
        self._coefficients: tuple[float, float, float] | None = None

    def note(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Records a step. num_attended: sum over its tokens of the earlier positions read."""
        if seconds <= 0.0:
            return
        values = (1, num_tokens, num_attended)
        features = [v / unit / seconds for v, unit in zip(values, UNITS, strict=True)]
        for i, x in enumerate(features):
            row = self._products[i]
            for j, y in enumerate(features):
                row[j] = MEMORY * row[j] + x * y
            self._sums[i] = MEMORY * self._sums[i] + x
        self._num_steps += 1
        self._coefficients = None

    def predict(self, num_tokens: float, num_attended: float) -> float:
        """Returns the predicted seconds of a step, or 0 if unknown."""
        return self.total(1, num_tokens, num_attended)

    def total(self, num_steps: float, num_tokens: float, num_attended: float) -> float:
        """Returns the predicted seconds of several steps with these totals, or 0 if unknown."""
        step, token, position = self._solved()
        return step * num_steps + token * num_tokens + position * num_attended

    def seconds_of(self, num_tokens: float, context: float) -> float:
        """Returns the seconds that prompt tokens after `context` positions add to a step."""
        _, token, position = self._solved()
        return num_tokens * (token + position * context)

    def tokens_within(self, seconds: float, context: float) -> float:
        """Returns the number of prompt tokens that add at most `seconds` to a step."""
        cost = self.seconds_of(1, context)
        return max(seconds, 0.0) / cost if cost > 0.0 else math.inf

    def _solved(self) -> tuple[float, float, float]:
        if self._num_steps < MIN_STEPS:
            return 0.0, 0.0, 0.0
        if self._coefficients is None:
            self._coefficients = self._solve()
        return self._coefficients

    def _solve(self) -> tuple[float, float, float]:
        """Returns the coefficients. Negative ones are set to zero, one at a time."""
        kept = [0, 1, 2]
        while True:
            values = self._solve_for(kept)
            negative = [i for i, value in zip(kept, values, strict=True) if value < 0.0]
            if not negative:
                break
            kept.remove(negative[0])
        found = dict(zip(kept, values, strict=True))
        step, token, position = (found.get(i, 0.0) / UNITS[i] for i in range(3))
        return step, token, position

    def _solve_for(self, kept: list[int]) -> list[float]:
        """Solves the normal equations of these coefficients by Gaussian elimination."""
        size = len(kept)
        matrix = [[self._products[i][j] for j in kept] + [self._sums[i]] for i in kept]
        ridge = RIDGE * max(matrix[i][i] for i in range(size))
        for i in range(size):
            matrix[i][i] += ridge
        for i in range(size):
            for j in range(i + 1, size):
                factor = matrix[j][i] / matrix[i][i]
                for k in range(i, size + 1):
                    matrix[j][k] -= factor * matrix[i][k]
        values = [0.0] * size
        for i in reversed(range(size)):
            rest = sum(matrix[i][j] * values[j] for j in range(i + 1, size))
            values[i] = (matrix[i][size] - rest) / matrix[i][i]
        return values
