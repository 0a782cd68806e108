"""Interface that receives the steps of an engine, and the tokens and ends of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workers.execution.step_input import StepOutput
from workers.scheduling.schedule import Schedule
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, FinishReason


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Step whose results were applied. start_s: time when the step was scheduled, in seconds of the
    engine's clock."""

    schedule: Schedule
    output: StepOutput
    start_s: float
    device_s: float
    """Seconds from the step's launch, or from the previous step's end if that was later, to the
    step's end."""
    host_us: dict[str, int]
    """Microseconds of host work by part, which is `schedule`, `build` or `update`. The times of the
    forward pass and of sampling are in `output`."""


class StepObserver(Protocol):
    """Observer of one engine. Its methods are called on the engine thread with the memory lock
    held. now: current time in seconds of the engine's clock."""

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Called when the sequence receives tokens from a step, before they are appended."""
        ...

    def on_end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        """Called when the sequence has ended or was refused. end: reason of the end."""
        ...

    def on_step(self, step: FinishedStep, now: float) -> None:
        """Called once per step, after `on_tokens` and `on_end` have been called for it."""
        ...


class NoObserver:
    """Implementation of `StepObserver` that does nothing."""

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        pass

    def on_end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        pass

    def on_step(self, step: FinishedStep, now: float) -> None:
        pass
