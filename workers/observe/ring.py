"""Ring buffer of a worker's most recent steps, for tests, benchmarks and the live view."""

from __future__ import annotations

import numpy as np

CAPACITY = 4096

STEP = np.dtype(
    [
        ("step", "i8"),
        ("start_s", "f8"),
        ("num_tokens", "i4"),
        ("num_sequences", "i4"),
        ("num_prefill_tokens", "i4"),
        ("num_sampled", "i4"),
        ("num_adapters", "i4"),
        ("num_running", "i4"),
        ("num_waiting", "i4"),
        ("num_free_pages", "i4"),
        ("num_preempted", "i4"),
        ("schedule_us", "i4"),
        ("build_us", "i4"),
        ("forward_us", "i4"),
        ("sample_us", "i4"),
        ("update_us", "i4"),
    ]
)
"""Record of one step. The sum of the `*_us` fields is the step's duration, without the time to send
the step's output. If the step was launched while the previous step was in flight, the sum is the
host's time for the step, and `sample_us` includes the time that the host waits for the step's end.
"""


class StepRing:
    """Ring buffer of step records, written by the engine thread and read by any thread. A reader
    may see a half-written record."""

    def __init__(self) -> None:
        self._records = np.zeros(CAPACITY, STEP)
        self.num_steps = 0

    def append(self, **values: float) -> None:
        """Appends a record. values: all fields of STEP except `step`."""
        values["step"] = self.num_steps
        # One assignment of a tuple, because sixteen assignments of single fields would take longer
        # than the rest of the method.
        self._records[self.num_steps % CAPACITY] = tuple(values[name] for name in STEP.names or ())
        self.num_steps += 1

    def last(self, count: int = CAPACITY) -> np.ndarray:
        """Returns a copy of the newest records, at most `count`, oldest first, with dtype STEP."""
        count = min(count, self.num_steps, CAPACITY)
        first = self.num_steps - count
        return self._records[np.arange(first, self.num_steps) % CAPACITY].copy()

    def columns(self) -> dict[str, list[float]]:
        """Returns all records by field, oldest first."""
        records = self.last()
        return {name: records[name].tolist() for name in STEP.names or ()}
