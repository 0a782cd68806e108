"""Messages on their way from the event loop to the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.adapters.pools import SteppedExecutor
from tests.workers.no_models import make_loop
from tests.workers.simulation import Simulation, generate
from tests.workers.simulator import VOCAB
from workers.policies.queue_limits import QueueBounds
from workers.process.server import Delivery, Disconnected
from workers.wire.frames import Abort, Prefetch, StepFrame
from workers.wire.protocol import AdapterRef, ErrorCode, Failed, FinishReason, Generate


@dataclass
class Box:
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
    box = Box()
    hint = Prefetch("model", AdapterRef("a"))
    with box.simulation.kv.lock:
        box.post(generate(0, [1, 2, 3], 4), generate(1, [1, 2, 3], 4, "b"))
        box.post(generate(2, [VOCAB], 4), generate(3, [], 4))
        for message in (hint, Abort(0), Disconnected()):
            box.loop.post(1, message)
    assert box.ended == {2: ErrorCode.INVALID, 3: ErrorCode.INVALID}
    assert not box.simulation.pool.asked
    box.hints.drain()
    assert set(box.simulation.pool.asked) == {"a", "b"}
    box.run()
    assert box.ended[0] is box.ended[1] is FinishReason.LENGTH


def test_a_hint_for_a_request_that_was_taken_does_nothing() -> None:
    box = Box()
    box.post(generate(0, [1, 2, 3], 4, "a"))
    box.run()
    asked = dict(box.simulation.pool.asked)
    box.hints.drain()
    assert box.simulation.pool.asked == asked == {}


def test_no_tenant_fills_the_inbox_for_the_others() -> None:
    box = Box(QueueBounds(max_requests=2, max_tokens=10))
    box.post(*(generate(number, [1], 4, tenant="a") for number in range(3)))
    box.post(*(generate(number, [1] * 6, 4, tenant="b") for number in (10, 11)))
    assert box.ended == {2: ErrorCode.OVERLOADED, 11: ErrorCode.OVERLOADED}
    assert box.failed[2].retry_after_s == 1.0
    for number, tenant in enumerate("cdefghij"):
        box.post(generate(20 + number, [1], 4, tenant=tenant))
    assert {20 + n for n in range(8)} & set(box.ended) == {25, 26, 27}, "of 8 requests 3 are here"
    box.loop._receive()
    box.post(generate(3, [1], 4, tenant="a"))
    assert 3 not in box.ended


def test_a_prompt_longer_than_the_bound_finds_room_alone() -> None:
    box = Box(QueueBounds(max_requests=2, max_tokens=2))
    box.post(generate(0, [1] * 5, 4))
    box.run()
    assert not box.failed and 0 in box.ended


def test_messages_are_handled_in_order() -> None:
    box = Box()
    box.post(generate(0, [1, 2, 3], 400))
    box.loop.post(0, Abort(0))
    box.post(generate(0, [1, 2, 3], 4))
    box.run()
    assert box.ended == {0: FinishReason.LENGTH}
    assert box.simulation.ring.last()["num_sampled"].sum() == 4


def test_the_time_in_the_inbox_counts() -> None:
    """The step before may take longer than the request has time."""
    box = Box()
    box.post(generate(0, [1, 2, 3], 4, timeout_s=1.0))
    box.simulation.clock.now += 2.0
    box.run()
    assert box.ended == {0: ErrorCode.EXPIRED}
