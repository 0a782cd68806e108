"""Times at which a sequence passed its stages in a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from adapters.pool.source import Load
from workers.wire.protocol import AdapterLoadTimes, SequenceTimes

MAX_PREEMPTIONS = 8
"""Maximum number of a sequence's preemptions whose times are kept; others are counted."""


@dataclass(slots=True)
class StageTimes:
    """Times of one sequence, in seconds of the worker's clock."""

    arrival_s: float
    started_s: float | None = None
    """Time of its first admission to a step; None while it has only waited."""
    first_token_s: float | None = None
    adapter_load: Load | None = None
    """Load of its adapter; None if there is none, or it was on the device at the arrival."""
    preempted_s: list[float] = field(default_factory=list[float])
    """Times of the first `MAX_PREEMPTIONS`."""
    num_preemptions: int = 0

    def note_preemption(self, now: float) -> None:
        self.num_preemptions += 1
        if len(self.preempted_s) < MAX_PREEMPTIONS:
            self.preempted_s.append(now)

    def told(self, now: float, model_away: tuple[float, float]) -> SequenceTimes:
        """Returns the times so far, relative to the arrival, as sent to the gateway. model_away:
        times when its base model was last unloaded and loaded."""
        left_s, back_s = model_away
        load = self.adapter_load
        return SequenceTimes(
            told_s=now - self.arrival_s,
            started_s=self._offset(self.started_s),
            first_token_s=self._offset(self.first_token_s),
            model_wait=(max(left_s - self.arrival_s, 0.0), back_s - self.arrival_s)
            if back_s > self.arrival_s
            else None,
            adapter_load=None
            if load is None
            else AdapterLoadTimes(
                load.tier,
                max(load.begun_s - self.arrival_s, 0.0),
                load.ended_s - self.arrival_s,
                max(load.copy_begun_s - self.arrival_s, 0.0),
                load.num_evicted,
            ),
            preempted_s=[at_s - self.arrival_s for at_s in self.preempted_s],
            num_preemptions=self.num_preemptions,
        )

    def _offset(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self.arrival_s
