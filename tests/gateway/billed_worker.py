"""A worker in the test's own loop: a real scheduler, cache and engine, stepped by the test. Its
device draws tokens at random and counts, apart from the code that bills, what a bill may hold."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.scripted_worker import DIGEST, LAYOUT
from tests.workers.simulation import Simulation, StubPool
from tests.workers.simulator import VOCAB, FakeClock, Late, Slots
from workers.execution.engine import Event
from workers.execution.step_input import (
    PendingStep,
    SequenceResult,
    StepInput,
    StepOutput,
)
from workers.process.loop import frames
from workers.process.server import Command, Disconnected, Server
from workers.scheduling.sequence import Sequence
from workers.wire.frames import Abort
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    Generate,
    ModelInfo,
    SequenceOutput,
    TokenLogprobs,
)

Prompt = tuple[int, ...]


@dataclass
class RequestCount:
    """What all workers did for one request."""

    positions: dict[Prompt, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Of each of its prompts, those that were computed or found."""
    num_cached: int = 0
    """Of these, what was found before it was computed."""
    num_tokens: int = 0
    """Told to the gateway."""
    num_computed: int = 0
    """Prompt positions, each as often as it was computed."""
    open: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    """Its sequences that have not ended, by worker, connection and id."""

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.positions.values()))

    @property
    def is_in_prompt(self) -> bool:
        """Something is computed, and nothing has an output."""
        return self.num_positions > 0 and not self.num_tokens

    def note(self, item: Rowed) -> None:
        """Takes rows that were computed: they have read all positions before them."""
        seen = self.positions[item.prompt]
        last = len(item.prompt)
        self.num_cached += len(set(range(min(item.start, last))) - seen)
        seen.update(range(min(item.end, last)))
        self.num_computed += max(min(item.end, last) - item.start, 0)


@dataclass(frozen=True)
class Rowed:
    """A sequence's part of a step."""

    request_id: str
    prompt: Prompt
    start: int
    end: int


Counts = dict[str, RequestCount]
"""By request id."""


@dataclass
class RecordingRunner:
    clock: FakeClock
    slots: Slots
    counts: Counts
    chance: random.Random

    def launch(self, step: StepInput) -> PendingStep:
        self.clock.now += 0.001 * int(step.counts.sum())
        slots, starts = step.sequence_slots.tolist(), step.starts.tolist()
        ends = (step.starts + step.counts).tolist()
        rowed = [
            _rowed(self.slots.sequence(slot), start, end)
            for slot, start, end in zip(slots, starts, ends, strict=True)
        ]
        results = [SequenceResult() for _ in rowed]
        for sample in step.samples:
            results[sample.sequence].tokens = [self.chance.randrange(VOCAB)]
        for score in step.scores:
            scores = [TokenLogprobs(token, -0.5, []) for token in score.targets]
            results[score.sequence].prompt_logprobs = scores

        def compute() -> StepOutput:
            for item in rowed:
                self.counts[item.request_id].note(item)
            return StepOutput(results)

        return Late(compute)


def _rowed(sequence: Sequence, start: int, end: int) -> Rowed:
    request = sequence.request
    prompt = tuple(request.tokens[: len(request.tokens) - request.num_resumed])
    return Rowed(request.request_id, prompt, start, end)


class BilledWorker:
    """Does nothing but in `receive`, `refuse` and `step`."""

    is_ready = True
    step_age_s = 0.0

    def __init__(self, folder: Path, name: str, counts: Counts, chance: random.Random) -> None:
        self.address = f"unix:{folder}/{name}"
        self.models = [ModelInfo(DIGEST, "tiny", 4096, LAYOUT)]
        self.is_up = False
        self.num_preemptions = 0
        self.refused_part = 0.0
        """Part of the calls of `refuse` that refuse a sequence."""
        self._name = name
        self._counts = counts
        self._chance = chance
        self._num_starts = 0

    async def start(self) -> None:
        self._num_starts += 1
        self._instance_id = f"{self._name}-{self._num_starts}"
        self._inbox: list[tuple[int, Command]] = []
        self._requests: dict[tuple[int, int], RequestCount] = {}
        """Of the sequences that have not ended, by connection and id."""
        self._simulation = Simulation(
            num_pages=self._chance.choice([36, 64]),
            max_batched_tokens=64,
            pool=StubPool(num_slots=2, delay_steps=1),
            runner=partial(RecordingRunner, counts=self._counts, chance=self._chance),
            runs_ahead=self._chance.random() < 0.5,
        )
        self._server = Server(self.address, instance_id=self._instance_id)
        await self._server.start(self)
        self.is_up = True

    @property
    def has_mail(self) -> bool:
        """Something has come since `receive`."""
        return bool(self._inbox)

    async def kill(self) -> None:
        """Between two steps: what has come it has taken, what it has computed it has told."""
        self.receive()
        self.is_up = False
        self.num_preemptions += self._simulation.scheduler.num_preemptions
        self._deliver(self._simulation.engine.suspend())
        await self._server.close()
        for key, count in self._requests.items():
            count.open.discard((self._instance_id, *key))

    def post(self, connection: int, message: Command) -> None:
        if isinstance(message, Generate):
            count = self._counts[message.request_id]
            self._requests[connection, message.id] = count
            count.open.add((self._instance_id, connection, message.id))
        self._inbox.append((connection, message))

    def receive(self) -> None:
        """Takes what has come and refuses what it must; what fails by it is told before a step."""
        inbox, self._inbox = self._inbox, []
        engine = self._simulation.engine
        self._simulation.clock.now += 0.001
        for connection, message in inbox:
            match message:
                case Generate():
                    if (refusal := engine.refusal(message)) is not None:
                        self._deliver([(connection, Failed(message.id, *refusal))])
                    else:
                        now = self._simulation.clock.now
                        self._deliver(engine.offer(connection, message, now))
                case Abort(id=sequence_id):
                    self._deliver(engine.abort(connection, sequence_id))
                case Disconnected():
                    engine.abort_connection(connection)
                case _:
                    pass
        self._deliver(engine.expire())

    def refuse(self) -> None:
        """Refuses now and then a waiting sequence, as if others needed its place in the queue."""
        if self._chance.random() < self.refused_part:
            engine = self._simulation.engine
            first = engine.scheduler.first_waiting
            refused = [] if first is None else [first]
            self._deliver(engine.fail(refused, ErrorCode.OVERLOADED, "the queue is full"))

    def step(self) -> None:
        engine = self._simulation.engine
        if engine.has_work:
            self._deliver(engine.step())

    def _deliver(self, events: list[Event]) -> None:
        for connection, event in events:
            key = connection, event.id
            count = self._requests[key]
            if isinstance(event, SequenceOutput):
                count.num_tokens += len(event.tokens)
            if isinstance(event, Failed) or getattr(event, "finish_reason", None) is not None:
                del self._requests[key]
                count.open.remove((self._instance_id, *key))
        if events:
            self._server.deliver(frames(events, take_own=lambda _: None))
