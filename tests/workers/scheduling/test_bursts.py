"""Of what a queue accepts, first tokens are in time: on workers that have just started too, and
whatever the device, the requests and the tenants are like."""

from __future__ import annotations

import random
from itertools import accumulate

import msgspec
import pytest

from tests.scale import scaled
from tests.workers.counting import Market, StepCost
from tests.workers.scheduling.test_fairness import ask
from tests.workers.simulation import prompt_of
from workers.execution.speed import measure_speed
from workers.policies.queue_limits import QueueBounds
from workers.process.warm_up import warm_up
from workers.scheduling.terms import TERMS
from workers.wire.protocol import Generate, ServiceClass

INTERACTIVE, STANDARD, BATCH = ServiceClass
SEEDS = [*range(2), *(pytest.param(n, marks=pytest.mark.full) for n in range(2, scaled(4, 100)))]
Arrivals = list[tuple[float, Generate]]
"""Each request with the seconds after the begin at which it comes."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(scaled(120, 3600))]


class Case:
    """A device, and requests that are alike, drawn at random: a CPU or a GPU, prompts and answers
    of any length, answers as long as they may be or a quarter of it, and more requests than can be
    served in time, which are at least two dozen."""

    def __init__(self, seed: int, *, is_answer_known: bool | None = None) -> None:
        """is_answer_known: answers are as long as they may be; None: drawn too."""
        self.rng = rng = random.Random(seed)
        self.is_gpu = is_gpu = rng.random() < 0.4
        if is_gpu:
            rows_s, positions_s = rng.uniform(2e-5, 1e-4), rng.uniform(0, 1e-8)
        else:
            rows_s, positions_s = rng.uniform(3e-4, 3e-3), rng.uniform(0, 1e-6)
        self.cost = StepCost(rng.uniform(0.005, 0.03), rows_s, positions_s)
        self.step_tokens = 2048 if is_gpu else 512
        self.num_slots = rng.choice([16, 32, 64])
        self.prompt, self.answer = rng.choice([100, 300, 700]), rng.choice([16, 64, 128])
        is_known = rng.random() < 0.5
        self.is_answer_known = is_known if is_answer_known is None else is_answer_known
        self.service_class = rng.choice([INTERACTIVE, STANDARD])
        token_s = self.cost.step_s / self.step_tokens + rows_s + positions_s * self.prompt / 2
        each_s = self.prompt * token_s + self.answer * rows_s
        self.max_wait_s = max(5.0, rng.uniform(30, 60) * each_s)
        self.num_requests = min(int(rng.uniform(2, 3) * self.max_wait_s / each_s), 500)

    def market(self, *, is_measured: bool = True, slowdown: float = 1.0) -> Market:
        """A worker that has just started. slowdown: times as long as in its warm-up that steps take
        from now on. A worker that is not measured loads its model for the first request."""
        max_wait_s = self.max_wait_s / TERMS[self.service_class].ttft_s
        market = Market(
            cost=self.cost,
            num_pages=40_000,
            max_num_seqs=self.num_slots,
            max_batched_tokens=self.step_tokens,
            bounds=QueueBounds(max_wait_s=max_wait_s),
            runs_ahead=self.is_gpu,
        )
        if is_measured:
            warm_up(market.engine)
            measure_speed(market.engine, market.clock)
        market.counts.slowdown = slowdown
        return market

    def request(
        self,
        market: Market,
        tenant: str,
        service_class: ServiceClass | None = None,
        prefix: list[int] | None = None,
    ) -> Generate:
        """prefix: before its own tokens, of which there are then fewer."""
        rng = self.rng
        num_prompt = min(int(self.prompt * rng.lognormvariate(0, 0.5)) + 1, 3500)
        num_answer = int(self.answer * rng.lognormvariate(-0.1, 0.4)) + 1
        request = ask(
            rng,
            tenant,
            num_prompt // 8 + 1 if prefix else num_prompt,
            num_answer if self.is_answer_known else 4 * num_answer,
            service_class=service_class or self.service_class,
        )
        params = msgspec.structs.replace(request.params, ignore_eos=False)
        market.counts.answers[request.id] = num_answer
        return msgspec.structs.replace(
            request, params=params, tokens=[*(prefix or []), *request.tokens]
        )

    def burst(self, market: Market, *tenants: str) -> Arrivals:
        """All at once, of the tenants in turn."""
        return [
            (0.0, self.request(market, tenants[number % len(tenants)]))
            for number in range(self.num_requests)
        ]


def play(market: Market, arrivals: Arrivals) -> None:
    """Until all have ended or are refused."""
    begin_s = market.clock.now
    left = sorted(arrivals, key=lambda each: each[0], reverse=True)
    while left or market.engine.has_work:
        while left and begin_s + left[-1][0] <= market.clock.now:
            market.offer(left.pop()[1])
        if market.engine.has_work:
            market.step()
        elif left:
            market.clock.now = begin_s + left[-1][0]
    market.clock.now += 1.0


def waits(market: Market, arrivals: Arrivals) -> list[float]:
    """Of those that were accepted: time until the first token, as a part of the longest that their
    class may wait."""
    max_wait_s = market.bounds.max_wait_s
    return [
        (market.first_s[request.id] - market.arrived_s[request.id])
        / (max_wait_s * TERMS[request.service_class].ttft_s)
        for _, request in arrivals
        if request.id in market.ended
    ]


def assert_in_time(found: list[float], most: float = 1.0) -> None:
    """At least 95 % of them wait no longer than that, and enough for that to mean something."""
    num_late = sum(wait > most for wait in found)
    assert len(found) >= 15 and num_late <= 0.05 * len(found), sorted(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_the_first_burst_as_much_is_accepted_as_later_and_in_time(seed: int) -> None:
    """Steps may take half as long again as in the warm-up: other processes have come."""
    case = Case(seed, is_answer_known=True)
    market = case.market(slowdown=case.rng.choice([1.0, 1.0, 1.5]))
    num_tenants = case.rng.choice([1, 2, 4])
    num_accepted: list[int] = []
    for name in "abc":
        # The same requests again, and nothing of them is cached for other tenants.
        case.rng = random.Random(seed)
        burst = case.burst(market, *(f"{name}{number}" for number in range(num_tenants)))
        play(market, burst)
        found = waits(market, burst)
        assert_in_time(found)
        assert max(found) > 0.5, "no more is refused than has to be"
        num_accepted.append(len(found))
    assert num_accepted[0] >= 0.8 * max(num_accepted[1:]), num_accepted


@pytest.mark.parametrize("seed", SEEDS)
def test_of_answers_of_unknown_length_no_more_is_accepted_than_in_time(seed: int) -> None:
    """They end long before they have to. How long they are is learned from the first ones."""
    case = Case(seed, is_answer_known=False)
    market = case.market()
    for _ in range(2):
        burst = case.burst(market, "t")
        play(market, burst)
        assert_in_time(waits(market, burst))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_accepted_before_any_step_was_timed_is_refused_as_soon_as_one_is(
    seed: int,
) -> None:
    """The model is told by the catalog and loaded for these requests: nothing is known of it."""
    case = Case(seed, is_answer_known=True)
    market = case.market(is_measured=False)
    case.rng = random.Random(seed)
    burst = case.burst(market, "t")
    play(market, burst)
    found = waits(market, burst)
    assert_in_time(found)
    case.rng = random.Random(seed)
    again = case.burst(market, "t again")
    play(market, again)
    assert len(found) >= 0.8 * len(waits(market, again))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_burst_of_another_tenant_makes_nobody_late(seed: int) -> None:
    """What was accepted for the whole device has to share it with those who come later."""
    case = Case(seed)
    market = case.market()
    arrivals: Arrivals = []
    for number, at_s in enumerate(accumulate(case.rng.uniform(0, 0.2) for _ in range(4))):
        requests = [case.request(market, f"t{number}") for _ in range(case.num_requests // 2)]
        arrivals += [(at_s * case.max_wait_s, request) for request in requests]
    play(market, arrivals)
    assert_in_time(waits(market, arrivals))


@pytest.mark.parametrize("seed", SEEDS)
def test_classes_wait_as_long_as_they_may(seed: int) -> None:
    case = Case(seed)
    market = case.market()
    arrivals: Arrivals = []
    for service_class in ServiceClass:
        at_s = case.rng.uniform(0, 0.5) * case.max_wait_s
        for _ in range(case.num_requests // 2):
            request = case.request(market, service_class.value, service_class)
            arrivals.append((at_s, request))
    play(market, arrivals)
    assert_in_time(waits(market, arrivals))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_of_twice_the_capacity_is_served_in_time(seed: int) -> None:
    case = Case(seed)
    market = case.market()
    seconds = 2 * case.max_wait_s
    arrivals = [
        (case.rng.uniform(0, seconds), case.request(market, f"t{number % 3}"))
        for number in range(2 * case.num_requests)
    ]
    play(market, arrivals)
    assert_in_time(waits(market, arrivals), most=1.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_that_are_cached_cost_what_is_left_of_them(seed: int) -> None:
    case = Case(seed)
    market = case.market()
    prefix = prompt_of(case.rng, case.prompt)

    def burst() -> Arrivals:
        count = 3 * case.num_requests
        return [(0.0, case.request(market, "t", prefix=prefix)) for _ in range(count)]

    num_accepted: list[int] = []
    for _ in range(2):
        requests = burst()
        play(market, requests)
        found = waits(market, requests)
        assert_in_time(found)
        num_accepted.append(len(found))
    assert num_accepted[1] >= 0.8 * num_accepted[0]
