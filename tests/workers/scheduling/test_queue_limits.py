"""Full queues: who is refused, and when he may come again."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.counting import Market, StepCost
from tests.workers.scheduling.test_fairness import ask
from tests.workers.simulation import StubPool
from tests.workers.waiting import waiting_of
from workers.execution.speed import measure_speed
from workers.policies.queue_limits import QueueBounds
from workers.process.warm_up import warm_up
from workers.scheduling.terms import TERMS
from workers.wire.protocol import MAX_RETRY_S, ErrorCode, Failed, Generate, ServiceClass


def waiting(market: Market) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sequence in waiting_of(market.scheduler):
        counts[sequence.request.tenant] = counts.get(sequence.request.tenant, 0) + 1
    return counts


def test_a_newcomer_pushes_out_the_newest_of_who_fills_more_than_his_share() -> None:
    rng = random.Random(1)
    market = Market(bounds=QueueBounds(max_requests=8))
    heavy = [ask(rng, "heavy", 10, 4) for _ in range(9)]
    market.offer(*heavy)
    assert set(market.failed) == {heavy[-1].id}
    light = [ask(rng, "light", 10, 4) for _ in range(5)]
    market.offer(*light)
    assert waiting(market) == {"heavy": 4, "light": 4}
    assert set(market.failed) == {*(r.id for r in heavy[4:]), light[-1].id}
    for failed in market.failed.values():
        assert failed.code is ErrorCode.OVERLOADED
        assert failed.retry_after_s >= 1.0
    market.run()
    assert market.ended == {r.id for r in heavy[:4] + light[:4]}


def test_who_is_late_and_pushed_out_is_refused_once() -> None:
    """The newest of a full queue is late when a newcomer takes his place."""
    rng = random.Random(1)
    market = Market(
        cost=StepCost(step_s=0.02),
        num_pages=400,
        max_num_seqs=1,
        bounds=QueueBounds(max_requests=8, max_wait_s=8.0),
    )
    measure_speed(market.engine, market.clock)
    for _ in range(9):
        market.offer(ask(rng, "heavy", 10, 30, service_class=ServiceClass.INTERACTIVE))
        market.step()
    market.clock.now += 30.0
    light = ask(rng, "light", 10, 4, service_class=ServiceClass.INTERACTIVE)
    events = market.engine.offer(0, light, market.clock.now) + market.engine.step()
    failed = [event.id for _, event in events if isinstance(event, Failed)]
    assert len(failed) == len(set(failed)) > 1 and light.id not in failed


def test_who_would_then_be_as_full_pushes_nobody_out() -> None:
    """Or else two would push each other out in turn."""
    rng = random.Random(11)
    market = Market(bounds=QueueBounds(max_requests=7))
    market.offer(*(ask(rng, "heavy", 10, 4) for _ in range(7)))
    market.offer(*(ask(rng, "light", 10, 4) for _ in range(9)))
    assert waiting(market) == {"heavy": 4, "light": 3}


def test_shares_of_the_queue_follow_weight_and_class() -> None:
    rng = random.Random(2)
    market = Market(bounds=QueueBounds(max_requests=40))
    market.offer(*(ask(rng, "batch", 10, 4, service_class=ServiceClass.BATCH) for _ in range(60)))
    for _ in range(60):
        market.offer(ask(rng, "one", 10, 4))
        market.offer(ask(rng, "two", 10, 4, weight=2))
    assert waiting(market) == {"batch": 10, "one": 10, "two": 20}


def test_giant_prompts_are_pushed_out_by_what_they_weigh() -> None:
    rng = random.Random(3)
    market = Market(num_pages=200, bounds=QueueBounds(max_tokens=3000))
    giants = [ask(rng, "giant", 1400, 4) for _ in range(2)]
    small = [ask(rng, "small", 100, 4) for _ in range(14)]
    market.offer(*giants + small)
    assert set(market.failed) == {giants[1].id}
    refused = ask(rng, "giant", 1400, 4)
    market.offer(refused)
    assert refused.id in market.failed
    assert waiting(market) == {"giant": 1, "small": 14}


def test_a_prompt_longer_than_the_queue_waits_only_where_nobody_does() -> None:
    """It pushes nobody out, and is not told to come again for ever."""
    rng = random.Random(4)
    market = Market(num_pages=200, bounds=QueueBounds(max_tokens=1000))
    market.offer(ask(rng, "a", 900, 4))
    too_long = ask(rng, "b", 1001, 4)
    market.offer(too_long)
    assert set(market.failed) == {too_long.id}
    market.run()
    again = ask(rng, "b", 1001, 4)
    market.offer(again)
    market.run()
    assert again.id in market.ended


def test_what_would_wait_too_long_is_refused_and_who_obeys_is_served() -> None:
    """Ten times what the device can do, and clients that come again when they are told to. All are
    served in the end, no wait is much longer than promised, and few are refused twice."""
    rng = random.Random(5)
    max_wait_s = 2.0
    market = Market(
        num_pages=200,
        max_num_seqs=8,
        max_batched_tokens=128,
        bounds=QueueBounds(max_wait_s=max_wait_s),
    )
    interactive = ServiceClass.INTERACTIVE
    todo = [(0.0, n, ask(rng, "t", 60, 20, service_class=interactive)) for n in range(40)]
    todo += [
        (1.0 + n * 0.01, n, ask(rng, "t", 60, 20, service_class=interactive))
        for n in range(40, 400)
    ]
    told_s: list[float] = []
    numbers: dict[int, int] = {}
    num_refused = 0
    while todo or market.engine.has_work:
        todo.sort()
        while todo and todo[0][0] <= market.clock.now:
            _, number, request = todo.pop(0)
            numbers[request.id] = number
            market.offer(request)
        # At once, or later because the first steps took longer than was believed.
        while market.failed:
            request_id, failed = market.failed.popitem()
            num_refused += 1
            told_s.append(failed.retry_after_s)
            again = ask(rng, "t", 60, 20, service_class=interactive)
            todo.append((market.clock.now + failed.retry_after_s, numbers[request_id], again))
        if market.engine.has_work:
            market.step()
        else:
            market.clock.now += 0.01
    assert len(market.ended) == 400
    measured = [n for n in market.ended if market.arrived_s[n] >= 1.0]
    waits = [market.counts.begun_s[n] - market.arrived_s[n] for n in measured]
    assert max(waits) < 2 * max_wait_s
    assert 0 < num_refused < 1200
    assert all(1.0 <= seconds <= MAX_RETRY_S for seconds in told_s)


def test_those_who_find_free_rows_are_not_refused_for_how_long_answers_are() -> None:
    """Answers of 400 tokens are long in leaving eight rows; then all of them are free."""
    rng = random.Random(6)

    def long_answer() -> Generate:
        return ask(rng, "t", 10, 400, service_class=ServiceClass.INTERACTIVE)

    market = Market(
        num_pages=400, max_num_seqs=8, max_batched_tokens=128, bounds=QueueBounds(max_wait_s=2.0)
    )
    warm_up(market.engine)
    measure_speed(market.engine, market.clock)
    for _ in range(2):
        burst = [long_answer() for _ in range(24)]
        market.offer(*burst)
        market.run()
        begun = {request.id for request in burst[:8]}
        assert not begun & market.failed.keys()
        assert market.failed.keys() >= {request.id for request in burst[8:]}


def test_what_cannot_be_in_time_is_refused_at_once() -> None:
    rng = random.Random(6)
    market = Market(max_num_seqs=2, max_batched_tokens=64)
    market.offer(*(ask(rng, "t", 50, 30) for _ in range(60)))
    market.step(200)
    hurried, patient = ask(rng, "t", 50, 30, timeout_s=0.5), ask(rng, "t", 50, 30, timeout_s=600.0)
    market.offer(hurried)
    market.offer(patient)
    assert market.failed.keys() == {hurried.id}
    assert market.failed[hurried.id].code is ErrorCode.OVERLOADED
    assert market.failed[hurried.id].pace_s == 0, "others of the tenant are not in such a hurry"


def test_refused_requests_of_a_new_tenant_come_again_one_after_the_other() -> None:
    """The tenant has no queue as long as each of its requests is refused."""
    rng = random.Random(6)
    market = Market(max_num_seqs=2, max_batched_tokens=64)
    market.offer(*(ask(rng, "t", 50, 30) for _ in range(60)))
    market.step(200)
    refused = [ask(rng, "new", 50, 30, timeout_s=0.1) for _ in range(40)]
    market.offer(*refused)
    waits = [market.failed[request.id].retry_after_s for request in refused]
    assert sorted(waits) == waits and 2 * waits[0] < waits[-1] <= MAX_RETRY_S


def test_a_resumed_answer_is_never_refused_nor_pushed_out() -> None:
    rng = random.Random(7)
    market = Market(bounds=QueueBounds(max_requests=2))
    resumed = [ask(rng, "a", 20, 30, num_resumed=5) for _ in range(3)]
    market.offer(*resumed)
    market.offer(ask(rng, "b", 10, 4))
    assert waiting(market) == {"a": 3}
    assert not market.failed.keys() & {request.id for request in resumed}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.integers(1, 120),
            st.sampled_from(list(ServiceClass)),
            st.integers(1, 3),
        ),
        max_size=60,
    ),
    st.integers(1, 12),
    st.integers(20, 600),
)
def test_the_bounds_hold_and_nobody_is_lost(
    requests: list[tuple[str, int, ServiceClass, int]], max_requests: int, max_tokens: int
) -> None:
    rng = random.Random(8)
    market = Market(num_pages=200, bounds=QueueBounds(max_requests, max_tokens))
    asked: set[int] = set()
    for tenant, num_tokens, service_class, weight in requests:
        request = ask(rng, tenant, num_tokens, 4, service_class=service_class, weight=weight)
        asked.add(request.id)
        market.offer(request)
        assert len(market.scheduler.waiting) == len(waiting_of(market.scheduler)) <= max_requests
        is_alone = len(market.scheduler.waiting) == 1
        assert market.scheduler.num_waiting_tokens <= max_tokens or is_alone
    market.run()
    assert market.ended | market.failed.keys() == asked
    assert not market.ended & market.failed.keys()
    assert market.scheduler.policy.status.weight == 0


def test_the_weight_of_those_with_work_is_told() -> None:
    rng = random.Random(9)
    market = Market(max_num_seqs=1)
    market.offer(ask(rng, "a", 10, 4, weight=3))
    market.offer(ask(rng, "a", 10, 8, weight=3))
    market.offer(ask(rng, "b", 10, 4))
    assert market.scheduler.policy.status.weight == 4
    weights = set[int]()
    while market.engine.has_work:
        market.step()
        weights.add(market.scheduler.policy.status.weight)
    assert weights == {4, 3, 1, 0} or weights == {4, 3, 0}


def test_a_weight_below_one_is_refused_by_name() -> None:
    failed = Market().submit(ask(random.Random(10), "a", 10, 4, weight=0))
    assert failed is not None and failed.code is ErrorCode.INVALID
    assert "weight" in failed.message


@pytest.mark.parametrize("num_requests", [1, 5])
def test_nobody_is_refused_for_a_wait_that_was_never_measured(num_requests: int) -> None:
    rng = random.Random(11)
    market = Market(bounds=QueueBounds(max_wait_s=0.001))
    market.offer(*(ask(rng, "a", 10, 4) for _ in range(num_requests)))
    assert not market.failed


def stood_still(market: Market) -> None:
    """One runs and one waits, and for longer than it takes to believe a rate none has left."""
    rng = random.Random(12)
    market.offer(ask(rng, "a", 10, 100))
    market.step()
    market.offer(ask(rng, "a", 5, 4))
    begun_s = market.clock.now
    while market.clock.now < begun_s + 1.0:
        market.step()


def test_a_queue_that_none_has_left_yet_is_not_taken_for_one_that_never_moves() -> None:
    """Those that run answer for long, so none leaves the queue for a while: whoever comes then
    would wait about as long as that, not for ever."""
    market = Market(max_num_seqs=1, bounds=QueueBounds(max_wait_s=15.0))
    stood_still(market)
    newcomers = [ask(random.Random(13), "a", 180, 4) for _ in range(4)]
    market.offer(*newcomers)
    assert not market.failed
    market.run()
    assert market.ended >= {request.id for request in newcomers}


def test_who_finds_a_full_queue_that_none_has_left_yet_is_told_when_to_come_again() -> None:
    market = Market(max_num_seqs=1, bounds=QueueBounds(max_requests=1))
    stood_still(market)
    refused = ask(random.Random(14), "a", 180, 4)
    market.offer(refused)
    assert market.failed.keys() == {refused.id}
    assert 1.0 <= market.failed[refused.id].retry_after_s < 4.0
    assert market.failed[refused.id].pace_s > 0


def test_time_in_which_the_model_was_away_says_nothing_of_the_queue() -> None:
    rng = random.Random(5)
    market = Market()
    runner = market.engine.runner
    market.engine.set_runner(None)
    assert runner is not None
    market.offer(ask(rng, "first", 10, 4, service_class=ServiceClass.INTERACTIVE))
    for _ in range(1400):
        market.clock.now += 0.01
        market.step()
    market.engine.set_runner(runner)
    for number in range(16):
        market.offer(ask(rng, f"t{number}", 10, 4, service_class=ServiceClass.INTERACTIVE))
    market.run()
    assert not market.failed


def test_who_finds_all_rows_taken_waits_for_the_first_that_comes_free() -> None:
    """If that is in time: nobody has waited before, so nothing was measured of it."""
    rng = random.Random(15)
    for num_left, is_refused in ((150, True), (20, False)):
        market = Market(max_num_seqs=1, bounds=QueueBounds(max_wait_s=0.1))
        running = ask(rng, "a", 10, 200)
        market.offer(running)
        while market.counts.num_steps < 200 - num_left:
            market.step()
        newcomer = ask(rng, "a", 10, 4)
        market.offer(newcomer)
        assert (newcomer.id in market.failed) == is_refused


def test_a_cold_adapter_that_is_long_in_coming_keeps_nobody_else_out() -> None:
    rng = random.Random(6)
    market = Market(pool=StubPool(num_slots=4, delay_steps=1 << 30))
    market.offer(ask(rng, "cold", 10, 4, adapter="never there"))
    for _ in range(2000):
        market.clock.now += 0.01
        market.step()
    other = ask(rng, "other", 10, 4, service_class=ServiceClass.INTERACTIVE)
    market.offer(other)
    market.step(5)
    assert other.id in market.ended


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_of_a_burst_on_a_fresh_worker_what_cannot_be_in_time_is_refused_at_once(
    num_tenants: int,
) -> None:
    """309 long prompts before any request was served: about four minutes of work, and 15 s to
    wait."""
    rng = random.Random(20)
    market = Market(num_pages=12_000, max_num_seqs=64, max_batched_tokens=512)
    warm_up(market.engine)
    measure_speed(market.engine, market.clock)
    requests = [
        ask(rng, f"t{n % num_tenants}", 600, 32, service_class=ServiceClass.INTERACTIVE)
        for n in range(309)
    ]
    market.offer(*requests)
    refused = dict(market.failed)
    assert all(failed.code is ErrorCode.OVERLOADED for failed in refused.values())
    assert all(failed.retry_after_s >= 1.0 for failed in refused.values())
    market.run()
    assert market.failed == refused, "nothing is refused later"
    accepted = [request.id for request in requests if request.id not in refused]
    waits = [market.first_s[number] - market.arrived_s[number] for number in accepted]
    assert max(waits) <= QueueBounds().max_wait_s
    assert max(waits) >= 0.7 * QueueBounds().max_wait_s, "no more is refused than has to be"


def test_a_moderate_burst_on_a_fresh_worker_is_accepted_whole() -> None:
    rng = random.Random(21)
    market = Market(num_pages=12_000, max_num_seqs=64, max_batched_tokens=512)
    warm_up(market.engine)
    measure_speed(market.engine, market.clock)
    for _ in range(16):
        market.offer(ask(rng, "t", 600, 32, service_class=ServiceClass.INTERACTIVE))
    assert not market.failed


def test_a_wait_at_another_worker_counts_towards_the_longest() -> None:
    """When it comes, and while it waits."""

    def market() -> Market:
        market = Market(
            num_pages=400, max_num_seqs=4, max_batched_tokens=64, bounds=QueueBounds(max_wait_s=1.0)
        )
        warm_up(market.engine)
        measure_speed(market.engine, market.clock)
        return market

    def accepted(market: Market, waited_s: float) -> set[int]:
        rng = random.Random(12)
        requests = [
            msgspec.structs.replace(
                ask(rng, "t", 60, 20, service_class=ServiceClass.STANDARD), waited_s=waited_s
            )
            for _ in range(100)
        ]
        market.offer(*requests)
        found = {request.id for request in requests} - market.failed.keys()
        market.counts.slowdown = 2.0
        market.run()
        return found

    max_wait_s = TERMS[ServiceClass.STANDARD].ttft_s
    counts = []
    for part in (0.0, 0.5):
        each = market()
        found = accepted(each, part * max_wait_s)
        waits = [each.first_s[n] - each.arrived_s[n] for n in found & each.first_s.keys()]
        assert found - each.first_s.keys(), "steps took longer than was believed"
        assert 0.3 * max_wait_s * (1 - part) < max(waits) <= max_wait_s * (1 - part)
        counts.append(len(found))
    assert 0.4 * counts[0] < counts[1] < 0.6 * counts[0]
