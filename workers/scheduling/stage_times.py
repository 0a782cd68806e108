"""Times at which a sequence passed its stages in a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from adapters.pool.source import AdapterLoad
from workers.wire.protocol import AdapterLoadTimes, SequenceTimes

MAX_PREEMPTIONS = 8
"""Number of preemptions of a sequence whose times are kept. Later preemptions are only counted."""


@dataclass(slots=True)
class StageTimes:
    """Times of one sequence, in seconds of the worker's clock. A time is None before its event."""

    arrival_s: float
    model_left_s: float | None = None
    """Time when the base model was last unloaded while the sequence was in the worker, or the time
    of the sequence's arrival if the model was not loaded at that time."""
    model_back_s: float | None = None
    started_s: float | None = None
    """Time when the sequence was first admitted to a step."""
    first_token_s: float | None = None
    """Time of the first token that this worker generated."""
    last_token_s: float | None = None
    adapter_load: AdapterLoad | None = None
    """Load of the sequence's adapter. None if the sequence has no adapter, or if the adapter was on
    the device when the sequence arrived."""
    preempted_s: list[float] = field(default_factory=list[float])
    """Times of the first `MAX_PREEMPTIONS` preemptions."""
    num_preemptions: int = 0

    def record_model(self, now: float, *, is_loaded: bool) -> None:
        """Records that the base model was loaded at `now`, or that it is no longer loaded."""
        if is_loaded:
            self.model_back_s = now
        else:
            self.model_left_s, self.model_back_s = now, None

    def record_preemption(self, now: float) -> None:
        self.num_preemptions += 1
        if len(self.preempted_s) < MAX_PREEMPTIONS:
            self.preempted_s.append(now)

    def to_wire(self, now: float) -> SequenceTimes:
        """Returns the times until `now`, relative to the arrival."""
        begin_s, left_s, back_s = self.arrival_s, self.model_left_s, self.model_back_s
        back_s = now if back_s is None else back_s
        return SequenceTimes(
            told_s=now - begin_s,
            started_s=None if self.started_s is None else self.started_s - begin_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - begin_s,
            model_wait=None if left_s is None else (left_s - begin_s, back_s - begin_s),
            adapter_load=self._load(),
            preempted_s=[at_s - begin_s for at_s in self.preempted_s],
            num_preemptions=self.num_preemptions,
        )

    def _load(self) -> AdapterLoadTimes | None:
        if (load := self.adapter_load) is None:
            return None
        return AdapterLoadTimes(
            load.tier,
            max(load.begun_s - self.arrival_s, 0.0),
            load.ended_s - self.arrival_s,
            max(load.copy_begun_s - self.arrival_s, 0.0),
            load.num_evicted,
        )
