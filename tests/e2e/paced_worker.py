"""`python -m tests.e2e.paced_worker CONFIG.json ID`: a worker on a device that computes the rows of
a step together and beside the host, as a GPU does: its steps take as long as a formula says, and
what the tiny model takes meanwhile counts for nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from workers.__main__ import main
from workers.execution.model_runner import LaunchedStep, ModelRunner
from workers.execution.step_input import StepInput
from workers.process.build import Worker

STEP_S, ROW_S = 0.012, 1 / 20_000
"""Of a step, and of each row in it: an 8B model on a large GPU, as in benchmarks/routing.py."""


@dataclass(frozen=True, slots=True)
class Due:
    """The event of a step that ends then."""

    at_s: float

    def synchronize(self) -> None:
        time.sleep(max(self.at_s - time.monotonic(), 0.0))

    def query(self) -> bool:
        return time.monotonic() >= self.at_s

    def wait(self) -> None:
        pass


class PacedRunner(ModelRunner):
    """Steps are computed one after the other."""

    _free_s = 0.0

    def launch(self, step: StepInput, *, may_use_graph: bool = True) -> LaunchedStep:
        begin_s = max(time.monotonic(), self._free_s)
        launched = super().launch(step, may_use_graph=may_use_graph)
        self._free_s = begin_s + STEP_S + ROW_S * int(step.counts.sum())
        return replace(launched, event=Due(self._free_s))


class PacedWorker(Worker):
    runner = PacedRunner

    @property
    def runs_ahead(self) -> bool:
        return True


if __name__ == "__main__":
    main(PacedWorker)
