"""How much longer prompts make the gaps between tokens of streams, where a step takes 10 ms and a
token half a millisecond more."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.counting import Market, StepCost
from tests.workers.scheduling.test_fairness import ask
from tests.workers.simulation import ANY_RATIO
from workers.execution.speed import measure_speed
from workers.policies.gap_limit import PATIENCE, GapLimit
from workers.policies.queue_limits import QueueBounds
from workers.policies.step_budget import StepBudget
from workers.policies.step_cost import StepTime
from workers.process.warm_up import warm_up
from workers.scheduling.constraint import (
    Constraint,
    ConstraintSource,
    NoConstraint,
    Unconstrained,
)
from workers.wire.protocol import Generate, SequenceOutput, ServiceClass

COST = StepCost(0.010, 0.0005)
seconds = st.floats(1e-4, 10.0)
stretches = st.lists(st.floats(1.0, 50.0), max_size=50)


class Streams(Market):
    """Streams that never end, and the gaps between their tokens."""

    def __init__(
        self,
        num_streams: int,
        max_gap_ratio: float,
        service_class: ServiceClass = ServiceClass.STANDARD,
        *,
        runs_ahead: bool = False,
        constraints: ConstraintSource = Unconstrained(),  # noqa: B008
    ) -> None:
        super().__init__(
            cost=COST,
            num_pages=20_000,
            max_num_seqs=64,
            max_batched_tokens=512,
            max_gap_ratio=max_gap_ratio,
            bounds=QueueBounds(max_wait_s=1e9),
            runs_ahead=runs_ahead,
            constraints=constraints,
        )
        warm_up(self.engine)
        measure_speed(self.engine, self.clock)
        self.rng = random.Random(1)
        self.arrivals: dict[int, list[float]] = defaultdict(list)
        self.streams = [
            ask(self.rng, "streams", 8, 10_000, service_class=service_class)
            for _ in range(num_streams)
        ]
        for stream in self.streams:
            self.offer(stream)
        for _ in range(50):
            self.step()
        self.alone_s = COST.step_s + COST.row_s * num_streams

    def _take(self, event: object) -> None:
        if isinstance(event, SequenceOutput):
            self.arrivals[event.id].append(self.clock.now)
        super()._take(event)

    def send(self, count: int, length: int) -> None:
        for _ in range(count):
            self.offer(ask(self.rng, "streams", length, 1))

    def gaps_s(self) -> np.ndarray:
        """Returns the gaps between the tokens of the streams since they began."""
        return np.concatenate([np.diff(self.arrivals[stream.id]) for stream in self.streams])


@pytest.mark.parametrize(("count", "length"), [(32, 64), (1, 4000), (4, 400)])
def test_prompts_that_arrive_together_at_most_double_the_gaps(count: int, length: int) -> None:
    streams = Streams(16, 2.0)
    streams.send(count, length)
    while len(streams.ended) < count:
        streams.step()
    assert streams.gaps_s().max() <= 2.0 * 1.05 * streams.alone_s


class NeedsToken(NoConstraint):
    needs_host_token = True


class StreamsNeedTokens(Unconstrained):
    """Keeps all sequences out of a step while their last token is in flight."""

    def open(self, request: Generate, generated: Sequence[int]) -> Constraint:
        return NeedsToken()


def test_prompts_do_not_fill_the_steps_between_those_of_constrained_streams() -> None:
    streams = Streams(16, 2.0, runs_ahead=True, constraints=StreamsNeedTokens())
    streams.send(1, 4000)
    while not streams.ended:
        streams.step()
    assert streams.gaps_s().max() <= 2 * 2.0 * 1.05 * streams.alone_s


@pytest.mark.parametrize("service_class", [ServiceClass.INTERACTIVE, ServiceClass.BATCH])
def test_a_prompt_that_waits_long_for_its_class_makes_steps_longer_at_once(
    service_class: ServiceClass,
) -> None:
    streams = Streams(4, 2.0)
    for _ in range(PATIENCE):
        streams.step()
    for _ in range(2):
        streams.offer(ask(streams.rng, "prompts", 2000, 1, service_class=service_class))
    while len(streams.ended) < 2:
        streams.step()
    is_hurried = streams.gaps_s().max() > 4 * streams.alone_s
    assert is_hurried == (service_class is ServiceClass.INTERACTIVE)


def test_without_streams_a_prompt_has_whole_steps() -> None:
    streams = Streams(0, 2.0)
    begin, num_before = streams.clock.now, streams.counts.num_steps
    streams.send(1, 2048)
    while not streams.ended:
        streams.step()
    assert streams.counts.num_steps - num_before == 4
    assert streams.clock.now - begin == pytest.approx(4 * 0.010 + 2048 * 0.0005, rel=0.01)


def test_a_worker_that_does_not_know_its_speed_starts_all_prompts_that_fit() -> None:
    limit = GapLimit(StepTime(), max_gap_s=0.25, max_ratio=2.0)
    assert limit.seconds(0.0, 1) == 0.25


def test_streams_of_class_batch_leave_more_to_prompts() -> None:
    longest_s: list[float] = []
    for service_class in (ServiceClass.STANDARD, ServiceClass.BATCH):
        streams = Streams(16, 2.0, service_class)
        streams.send(1, 4000)
        while not streams.ended:
            streams.step()
        longest_s.append(streams.gaps_s().max())
    assert longest_s[1] > 4 * longest_s[0]


@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_prompts_without_end_get_nearly_all_tokens_and_gaps_are_alike(num_streams: int) -> None:
    """After many steps without prompts, and then as many with them as are not typical."""
    rates: list[float] = []
    for max_gap_ratio in (2.0, ANY_RATIO):
        streams = Streams(num_streams, max_gap_ratio)
        for _ in range(PATIENCE):
            streams.step()
        ends = PATIENCE + 150, PATIENCE + 450
        work: list[tuple[float, int]] = []
        for number in range(ends[1] + 1):
            if number in ends:
                work.append((streams.clock.now, sum(streams.counts.served.values())))
            streams.send(4 - len(streams.scheduler.waiting), 1000)
            streams.step()
        (begin_s, num_before), (end_s, num_after) = work
        rates.append((num_after - num_before) / (end_s - begin_s))
        if max_gap_ratio != ANY_RATIO:
            last = np.diff(streams.arrivals[streams.streams[0].id][-200:])
            assert last.max() < 1.3 * np.median(last)
    assert rates[0] > 0.95 * rates[1]


@given(stretches, seconds, seconds, st.floats(1.25, 10.0), st.integers(1, 64))
def test_limits_are_between_the_ratio_and_the_longest_gap(
    recorded: list[float], decode_s: float, max_gap_s: float, max_ratio: float, num_tokens: int
) -> None:
    limit = GapLimit(learned(), max_gap_s=max_gap_s, max_ratio=max_ratio)
    for stretch in recorded:
        limit.record(stretch)
    allowed_s = limit.seconds(decode_s, num_tokens)
    assert min(max_ratio * decode_s, max_gap_s) <= allowed_s <= max_gap_s
    assert allowed_s <= limit.seconds(1.1 * decode_s, num_tokens)
    limit.record(1.0)
    assert limit.seconds(decode_s, num_tokens) <= allowed_s


@given(seconds, st.floats(-1.0, 10.0), seconds, st.integers(1, 4096), st.integers(0, 10**5))
def test_a_budget_always_has_a_token_and_never_more_than_a_step(
    decode_s: float, due_s: float, max_gap_s: float, num_tokens: int, context: int
) -> None:
    def room(due_s: float, max_gap_s: float, context: int) -> int:
        budget = StepBudget(
            learned(),
            num_tokens=num_tokens,
            decode_s=decode_s,
            over_share_s=1.4 * decode_s,
            seconds=due_s,
            max_gap_s=max_gap_s,
        )
        assert not budget.is_spent(is_over_share=False)
        return budget.room(context, is_over_share=False)

    found = room(due_s, max_gap_s, context)
    assert 1 <= found <= num_tokens
    assert room(due_s + 0.1, max_gap_s, context) >= found
    assert room(due_s, 2 * max_gap_s, context) >= found
    assert room(due_s, max_gap_s, context + 1000) <= found


def learned() -> StepTime:
    """Steps of 10 ms, half a millisecond more for each token, and more for each position."""
    step_time = StepTime()
    for number in range(200):
        num_tokens, num_attended = 1 + 7 * number % 97, 1000 * (31 * number % 89)
        step_time.record(num_tokens, num_attended, 0.01 + 5e-4 * num_tokens + 1e-7 * num_attended)
    return step_time
