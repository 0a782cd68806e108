"""Observer of an engine's steps and sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workers.execution.step_input import StepOutput
from workers.scheduling.schedule import Schedule
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, FinishReason


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Step whose results were applied. Times in seconds of the engine's clock."""

    schedule: Schedule
    output: StepOutput
    start_s: float
    device_s: float
    """Seconds that the device computed it, from its launch or the end of the previous step."""
    host_us: dict[str, int]
    """Microseconds of the host's work by part; the device times are in the output."""


class StepObserver(Protocol):
    """Observer of one engine. Called on the engine thread with the memory lock held. `now`: time of
    the engine's clock."""

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Called when the sequence receives tokens from a step, before they are appended."""
        ...

    def on_end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        """Called when the sequence has ended, or was refused."""
        ...

    def on_step(self, step: FinishedStep, now: float) -> None:
        """Called after the tokens and ends of a step."""
        ...


class NoObserver:
    """Simplest `StepObserver`: ignores everything."""

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        pass

    def on_end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        pass

    def on_step(self, step: FinishedStep, now: float) -> None:
        pass
