"""Who waits for a whole answer is told of it some tokens at a time, and of the same tokens."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.simulation import Simulation, StubPool, TokenCount, generate, prompt_of
from tests.workers.simulator import alone
from workers.execution.engine import Event
from workers.wire.protocol import ErrorCode, SequenceOutput


class Heard(Simulation):
    """Keeps how many tokens each output had."""

    def __init__(self, num_pages: int) -> None:
        pool = StubPool(num_slots=2, delay_steps=1)
        super().__init__(num_pages=num_pages, pool=pool, observe=TokenCount)
        self.sizes: dict[int, list[int]] = {}

    def _note(self, events: list[Event]) -> None:
        super()._note(events)
        for _, event in events:
            if isinstance(event, SequenceOutput):
                self.sizes.setdefault(event.id, []).append(len(event.tokens))


@pytest.mark.full
@pytest.mark.usefixtures("both_ways")
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(14, 60))
def test_tokens_are_told_so_many_at_a_time(seed: int, num_pages: int) -> None:
    """The first by itself, the last with what is left; some sequences begun elsewhere, and with
    memory so short that some are preempted."""
    rng = random.Random(seed)
    simulation = Heard(num_pages)
    expected: dict[int, list[int]] = {}
    intervals: dict[int, int] = {}
    for number in range(16):
        interval = intervals[number] = rng.choice([1, 2, 7, 100])
        adapter = rng.choice([None, "a", "b"])
        request = generate(number, prompt_of(rng, rng.randrange(1, 50)), 60, adapter)
        whole = alone(request)
        num_resumed = rng.randrange(len(whole))
        expected[number] = whole[num_resumed:]
        resumed = msgspec.structs.replace(
            request,
            tokens=request.tokens + whole[:num_resumed],
            num_resumed=num_resumed,
            stream_interval=interval,
        )
        assert simulation.submit(resumed) is None
        simulation.step()
    simulation.run()
    assert simulation.outputs == expected
    assert simulation.num_counted == sum(map(len, expected.values()))
    for number, (first, *sizes) in simulation.sizes.items():
        assert first == 1
        assert all(size == intervals[number] for size in sizes[:-1])
        assert all(1 <= size <= intervals[number] for size in sizes[-1:])
    simulation.assert_at_rest()


def test_an_interval_that_is_none_is_refused() -> None:
    simulation = Simulation()
    failed = simulation.submit(generate(0, [1, 2, 3], stream_interval=0))
    assert failed is not None and failed.code is ErrorCode.INVALID
    assert "stream interval" in failed.message
