"""An engine without any model: what each tenant is given is counted, and a step takes as long as a
formula says. For proofs over many steps."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import NamedTuple

from tests.workers.simulation import Simulation
from tests.workers.simulator import END, FakeClock, Late, Slots
from workers.execution.step_input import PendingStep, SequenceResult, StepInput, StepOutput
from workers.policies.fairness_policy import DECODE_COST, PREFILL_COST
from workers.wire.protocol import Failed, Generate, SequenceOutput

STEP_S, ROW_S = 0.010, 0.001


class StepCost(NamedTuple):
    """Seconds of a step, of each row in it, and of each position that a row attends to."""

    step_s: float = STEP_S
    row_s: float = ROW_S
    position_s: float = 0.0


class CountingRunner:
    """Each token generated is 0, unless an answer ends with it. The device computes one step after
    the other, whatever the host does in the meantime."""

    def __init__(self, clock: FakeClock, slots: Slots, cost: StepCost = StepCost()) -> None:  # noqa: B008
        self.cost = cost
        self.slowdown = 1.0
        """Times as long as `cost` says that steps take."""
        self.answers: dict[int, int] = {}
        """Tokens of the answer to a request that ends before its `max_tokens`."""
        self.clock = clock
        self.served: Counter[str] = Counter()
        """Cost of the rows computed, by tenant; of those computed again after a preemption none."""
        self.by_class: Counter[str] = Counter()
        self._computed: Counter[int] = Counter()
        self._generated: Counter[int] = Counter()
        self._slots = slots
        self.begun_s: dict[int, float] = {}
        """When the prompt of each request began."""
        self.num_steps = 0
        self._free_s = 0.0
        """When the last step launched ends."""

    def launch(self, step: StepInput) -> PendingStep:
        self.num_steps += 1
        num_attended = 0
        for slot, start, end in _spans(step):
            num_attended += (end - start) * start
            sequence = self._slots.user(slot)
            if sequence is None:
                continue  # a step of no sequence, which is timed
            request = sequence.request
            num_new = end - max(self._computed[request.id], start)
            cost = int(PREFILL_COST if sequence.is_pending else DECODE_COST) * max(num_new, 0)
            self._computed[request.id] = max(self._computed[request.id], end)
            self.served[request.tenant] += cost
            self.by_class[request.service_class] += cost
            self.begun_s.setdefault(request.id, self.clock.now)
        step_s, row_s, position_s = self.cost
        seconds = step_s + row_s * int(step.counts.sum()) + position_s * num_attended
        self._free_s = max(self._free_s, self.clock.now) + self.slowdown * seconds
        results = [SequenceResult() for _ in step.counts]
        for sample in step.samples:
            results[sample.sequence].tokens = [
                self._draw(int(step.sequence_slots[sample.sequence]))
            ]
        return Late(partial(self._end, StepOutput(results), self._free_s))

    def _end(self, output: StepOutput, end_s: float) -> StepOutput:
        self.clock.now = max(self.clock.now, end_s)
        return output

    def _draw(self, slot: int) -> int:
        user = self._slots.user(slot)
        if user is None:
            return 0
        number = user.request.id
        self._generated[number] += 1
        return END if self._generated[number] == self.answers.get(number) else 0


def _spans(step: StepInput) -> list[tuple[int, int, int]]:
    """Slot, first position and last one of each sequence."""
    columns = step.sequence_slots, step.starts, step.starts + step.counts
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Market(Simulation):
    """Requests come through the bounds of the queue."""

    def __init__(self, *, cost: StepCost = StepCost(), **options: object) -> None:  # noqa: B008
        """cost: of steps."""
        super().__init__(runner=partial(CountingRunner, cost=cost), **options)  # pyright: ignore
        self.failed: dict[int, Failed] = {}
        self.arrived_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.ended: set[int] = set()

    @property
    def counts(self) -> CountingRunner:
        assert isinstance(self.runner, CountingRunner)
        return self.runner

    def offer(self, *requests: Generate) -> None:
        for request in requests:
            self.clock.now += 1e-6
            self.arrived_s[request.id] = self.clock.now
            for _, event in self.engine.offer(0, request, self.clock.now):
                self._take(event)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for _, event in self.engine.step():
                self._take(event)

    def _take(self, event: object) -> None:
        if isinstance(event, Failed):
            self.failed[event.id] = event
        elif isinstance(event, SequenceOutput):
            self.first_s.setdefault(event.id, self.clock.now)
            if event.finish_reason is not None:
                self.ended.add(event.id)
