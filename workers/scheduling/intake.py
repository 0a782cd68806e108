"""Interface by which the scheduler asks which requests its queue refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workers.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a sequence. retry_after_s: seconds until there may be room for it. pace_s: seconds
    until the tenant's next place becomes free, or 0 if there is room for other requests."""

    sequence: Sequence
    message: str
    retry_after_s: float
    pace_s: float = 0.0


class Intake(Protocol):
    """Bounds of a scheduler's queue. The scheduler reports the starts and ends of sequences and
    steps, so that the intake can predict how long requests wait."""

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens that are computed per second; 0 if unknown."""
        ...

    def refuse_for(self, newcomer: Sequence, now: float) -> list[Refusal]:
        """Returns the sequences to refuse so that the newcomer can be queued, or the newcomer alone
        if it is to be refused."""
        ...

    def refuse_late(self, now: float) -> list[Refusal]:
        """Returns the waiting sequences whose first token is predicted to be late. Called after a
        step is scheduled, if sequences wait for slots, pages or time."""
        ...

    def hold(self, now: float) -> None:
        """Called when no sequence may be admitted at `now`, because the base model is unavailable.
        Waiting before that time does not count as late."""
        ...

    def on_start(self, sequence: Sequence) -> None: ...

    def on_preempt(self, sequence: Sequence) -> None: ...

    def on_end(self, sequence: Sequence) -> None:
        """Called when a running sequence has ended."""
        ...

    def on_step(
        self, num_tokens: int, num_attended: int, ended_s: float, *, is_backlogged: bool
    ) -> None:
        """Called when a step has ended. num_attended: `Schedule.num_attended`. is_backlogged:
        whether sequences wait for slots, pages or time."""
        ...

    def pause(self) -> None:
        """Called when no step is in flight, so that the time until the next step begins does not
        count as time of the step."""
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
