"""Recomputation of failed steps, which finds the sequences that cause the failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.execution.step_input import DeviceFailed, PendingStep, SequenceResult, StepOutput
from workers.scheduling.schedule import ScheduledSequence
from workers.wire.protocol import ErrorCode


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """Implementation of `PendingStep` for a step that is already computed."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


Launch = Callable[[list[ScheduledSequence]], PendingStep]


def recompute(
    items: list[ScheduledSequence], error: Exception, launch: Launch
) -> list[SequenceResult]:
    """Returns the results of a step that has failed with `error`. Computes each half of the items
    as a step of its own, and divides a half that fails again. An item that fails on its own gets
    the error `internal`. A repeated computation writes the same KV and draws the same tokens.
    Raises DeviceFailed."""
    if isinstance(error, DeviceFailed):
        raise error
    if len(items) <= 1:
        return [SequenceResult(error=ErrorCode.INTERNAL) for _ in items]
    results: list[SequenceResult] = []
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        try:
            results += launch(half).result().sequences
        except Exception as half_error:
            results += recompute(half, half_error, launch)
    return results
