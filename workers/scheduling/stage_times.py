"""When a sequence passed the stages of its way through a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.wire.protocol import AdapterLoadTimes, SequenceTimes

if TYPE_CHECKING:
    from adapters.pool.tiers import Load

MAX_PREEMPTIONS = 8
"""Preemptions of one sequence whose times are kept; further ones are only counted."""


@dataclass(slots=True)
class StageTimes:
    """Times of one sequence, in seconds of the worker's clock."""

    arrival_s: float
    started_s: float | None = None
    """When it was first admitted to a step. None: it has only waited."""
    first_token_s: float | None = None
    adapter_load: Load | None = None
    """Tier that its adapter came from, begin and end. None: the adapter was on the device when the
    sequence arrived, or there is none."""
    preempted_s: list[float] = field(default_factory=list[float])
    """The first `MAX_PREEMPTIONS`."""
    num_preemptions: int = 0

    def note_preemption(self, now: float) -> None:
        self.num_preemptions += 1
        if len(self.preempted_s) < MAX_PREEMPTIONS:
            self.preempted_s.append(now)

    def told(self, now: float, model_away: tuple[float, float]) -> SequenceTimes:
        """The times so far, as the gateway gets them. model_away: when its
        base model last left the device and came back."""
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
