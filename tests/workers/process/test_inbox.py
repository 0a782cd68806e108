"""Messages on their way from the event loop to the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from adapters.reference import AdapterRef
from tests.adapters.pools import SteppedExecutor
from tests.workers.no_models import make_loop
from tests.workers.simulation import Simulation, generate
from tests.workers.simulator import VOCAB
from workers.policies.queue_limits import QueueBounds
from workers.process.server import Delivery, Disconnected
from workers.wire.frames import Abort, Prefetch, StepFrame
from workers.wire.protocol import ErrorCode, Failed, FinishReason, Generate


@dataclass
class Worker:
    bounds: QueueBounds = QueueBounds()  # noqa: RUF009
    ended: dict[int, FinishReason | ErrorCode] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.simulation = Simulation()
        self.hints = SteppedExecutor()
        self.loop = make_loop(
            self.simulation.instance,
            self.simulation.kv.lock,
            self.simulation.clock,
            deliver=self._take,
            status=lambda *_: pytest.fail("no status is due"),
            bounds=self.bounds,
            hints=self.hints,
        )
        self.loop._next_status_s = 1e9

    def post(self, *requests: Generate) -> None:
        for request in requests:
            self.loop.post(0, request)

    def run(self) -> None:
        """Turns the loop until everything has ended."""
        self.loop._receive()
        while self.loop.has_work:
            self.loop._emit(self.simulation.engine.step())

    def _take(self, delivery: Delivery) -> None:
        for _, message in delivery:
            if isinstance(message, Failed):
                self.failed[message.id], self.ended[message.id] = message, message.code
            for output in message.sequences if isinstance(message, StepFrame) else []:
                if output.finish_reason is not None:
                    self.ended[output.id] = output.finish_reason


def test_no_message_waits_for_the_memory_lock() -> None:
    """However long another thread holds it: here the one that posts."""
    worker = Worker()
    hint = Prefetch("model", AdapterRef("a"))
    with worker.simulation.kv.lock:
        worker.post(generate(0, [1, 2, 3], 4), generate(1, [1, 2, 3], 4, "b"))
        worker.post(generate(2, [VOCAB], 4), generate(3, [], 4))
        for message in (hint, Abort(0), Disconnected()):
            worker.loop.post(1, message)
    assert worker.ended == {2: ErrorCode.INVALID, 3: ErrorCode.INVALID}
    assert not worker.simulation.pool.asked
    worker.hints.drain()
    assert set(worker.simulation.pool.asked) == {"a", "b"}
    worker.run()
    assert worker.ended[0] is worker.ended[1] is FinishReason.LENGTH


def test_a_hint_for_a_request_that_was_taken_does_nothing() -> None:
    worker = Worker()
    worker.post(generate(0, [1, 2, 3], 4, "a"))
    worker.run()
    asked = dict(worker.simulation.pool.asked)
    worker.hints.drain()
    assert worker.simulation.pool.asked == asked == {}


def test_no_tenant_fills_the_inbox_for_the_others() -> None:
    worker = Worker(QueueBounds(max_requests=2, max_tokens=10))
    worker.post(*(generate(number, [1], 4, tenant="a") for number in range(3)))
    worker.post(*(generate(number, [1] * 6, 4, tenant="b") for number in (10, 11)))
    assert worker.ended == {2: ErrorCode.OVERLOADED, 11: ErrorCode.OVERLOADED}
    assert worker.failed[2].retry_after_s == 1.0
    for number, tenant in enumerate("cdefghij"):
        worker.post(generate(20 + number, [1], 4, tenant=tenant))
    assert {20 + n for n in range(8)} & set(worker.ended) == {25, 26, 27}, (
        "of 8 requests 3 are here"
    )
    worker.loop._receive()
    worker.post(generate(3, [1], 4, tenant="a"))
    assert 3 not in worker.ended


def test_a_prompt_longer_than_the_bound_finds_room_alone() -> None:
    worker = Worker(QueueBounds(max_requests=2, max_tokens=2))
    worker.post(generate(0, [1] * 5, 4))
    worker.run()
    assert not worker.failed and 0 in worker.ended


def test_messages_are_handled_in_order() -> None:
    worker = Worker()
    worker.post(generate(0, [1, 2, 3], 400))
    worker.loop.post(0, Abort(0))
    worker.post(generate(0, [1, 2, 3], 4))
    worker.run()
    assert worker.ended == {0: FinishReason.LENGTH}
    assert worker.simulation.ring.last()["num_sampled"].sum() == 4


def test_the_time_in_the_inbox_counts() -> None:
    """The step before may take longer than the request has time."""
    worker = Worker()
    worker.post(generate(0, [1, 2, 3], 4, timeout_s=1.0))
    worker.simulation.clock.now += 2.0
    worker.run()
    assert worker.ended == {0: ErrorCode.EXPIRED}
