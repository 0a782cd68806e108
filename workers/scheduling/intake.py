"""Interface that decides which requests are refused because the scheduler's queue is too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workers.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a sequence. retry_after_s: seconds until the queue may have room for the sequence.
    pace_s: seconds until the tenant's next place in the queue becomes free, or 0 if the queue has
    room for other requests of the tenant."""

    sequence: Sequence
    message: str
    retry_after_s: float
    pace_s: float = 0.0


class Intake(Protocol):
    """Limits of a scheduler's queue. The scheduler reports the starts and ends of sequences and
    steps, from which the intake predicts how long requests wait."""

    @property
    def prompt_tokens_per_s(self) -> float:
        """Number of prompt tokens that are computed per second; 0 if unknown."""
        ...

    def refuse_for(self, newcomer: Sequence, now: float) -> list[Refusal]:
        """Returns refusals of waiting sequences, so that the newcomer can be queued, or a refusal
        of the newcomer alone. Returns an empty list if the newcomer can be queued at once."""
        ...

    def refuse_late(self, now: float) -> list[Refusal]:
        """Returns refusals of the waiting sequences whose first token is predicted to be late.
        Called after a step is scheduled, if `SchedulingPolicy.is_backlogged`."""
        ...

    def hold(self, now: float) -> None:
        """Called when no sequence may be admitted at `now`, because the base model is unavailable.
        Time that a sequence waited before `now` does not make it late."""
        ...

    def on_start(self, sequence: Sequence) -> None: ...

    def on_preempt(self, sequence: Sequence) -> None: ...

    def on_end(self, sequence: Sequence) -> None:
        """Called when a running sequence has ended."""
        ...

    def on_step(
        self, num_tokens: int, num_attended: int, ended_s: float, *, is_backlogged: bool
    ) -> None:
        """Called when a step has ended. ended_s: time when the step ended. num_attended: the step's
        `Schedule.num_attended`. is_backlogged: `SchedulingPolicy.is_backlogged` at that time."""
        ...

    def pause(self) -> None:
        """Called when no step is in flight, so that the time until the next step begins does not
        count as time of that step."""
        ...

    def forget_speed(self) -> None:
        """Forgets the recorded times of steps."""
        ...


class OpenIntake:
    """Implementation of `Intake` that refuses no sequence."""

    prompt_tokens_per_s = 0.0

    def refuse_for(self, newcomer: Sequence, now: float) -> list[Refusal]:
        return []

    def refuse_late(self, now: float) -> list[Refusal]:
        return []

    def hold(self, now: float) -> None:
        pass

    def on_start(self, sequence: Sequence) -> None:
        pass

    def on_preempt(self, sequence: Sequence) -> None:
        pass

    def on_end(self, sequence: Sequence) -> None:
        pass

    def on_step(
        self, num_tokens: int, num_attended: int, ended_s: float, *, is_backlogged: bool
    ) -> None:
        pass

    def pause(self) -> None:
        pass

    def forget_speed(self) -> None:
        pass
