"""Classes and tenants get what they are promised, on a simulated device."""

from __future__ import annotations

import random
from itertools import combinations, count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tests.workers.counting import ROW_S, Market
from tests.workers.simulation import ANY_RATIO, StubPool, generate, prompt_of
from tests.workers.waiting import waiting_of
from workers.execution.speed import measure_speed
from workers.policies.fairness_policy import DECODE_COST, MAX_TOKEN_GAP_S, due_s
from workers.policies.queue_limits import QueueBounds
from workers.scheduling.terms import TERMS
from workers.wire.protocol import ErrorCode, Generate, ServiceClass

INTERACTIVE, STANDARD, BATCH = ServiceClass
NUM_PAGES = 48
NUM_TOKENS = NUM_PAGES * 16
MAX_NUM_SEQS = 16
numbers = count()


def ask(
    rng: random.Random, tenant: str, num_prompt: int, max_tokens: int, **fields: object
) -> Generate:
    """Its end token is ignored, and its prompt is like no other."""
    request = generate(next(numbers), prompt_of(rng, num_prompt), max_tokens, **fields)  # pyright: ignore
    params = msgspec.structs.replace(request.params, ignore_eos=True)
    return msgspec.structs.replace(request, params=params, tenant=tenant, cache_domain=tenant)


@settings(max_examples=scaled(12, 400), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
@pytest.mark.soak
def test_backlogged_tenants_are_served_alike(seed: int, num_tenants: int, weighted: bool) -> None:
    """The bound of VTC: over any time in which two of them always have something waiting, what they
    are given differs by 2 max(w_p L, w_q M) at most, L being a prompt and M the tokens in memory;
    a tenant of weight w is given w times as much. With preemption, for memory is short."""
    rng = random.Random(seed)
    market = Market(
        num_pages=NUM_PAGES,
        max_num_seqs=MAX_NUM_SEQS,
        max_batched_tokens=128,
        bounds=QueueBounds(max_wait_s=1e9),
    )
    weights = {f"t{n}": rng.choice([1, 2, 5]) if weighted else 1 for n in range(num_tenants)}
    sizes = {t: (rng.randrange(1, 200), rng.randrange(1, 120)) for t in weights}
    live: dict[str, list[int]] = {tenant: [] for tenant in weights}
    extremes = {pair: [0.0, 0.0] for pair in combinations(weights, 2)}
    for _ in range(scaled(400, 5000)):
        for tenant, weight in weights.items():
            live[tenant] = [n for n in live[tenant] if n not in market.counts.begun_s]
            for _ in range(MAX_NUM_SEQS + 1 - len(live[tenant])):
                prompt, output = sizes[tenant]
                request = ask(
                    rng, tenant, rng.randrange(1, prompt + 1), rng.randrange(1, output + 1)
                )
                market.offer(msgspec.structs.replace(request, weight=weight))
                live[tenant].append(request.id)
        market.step()
        served = {t: market.counts.served[t] / w for t, w in weights.items()}
        for (one, other), extreme in extremes.items():
            gap = served[one] - served[other]
            extreme[:] = min(extreme[0], gap), max(extreme[1], gap)
    assert not market.failed
    bound = 2 * DECODE_COST * NUM_TOKENS
    assert max(high - low for low, high in extremes.values()) <= bound


def service_gap(num_steps: int) -> tuple[float, float]:
    """The largest gap seen between tenants that always have something waiting, one of them with
    giant prompts, and its bound. There are pages for all and rows are short."""
    rng = random.Random(1)
    num_pages = 200
    market = Market(
        num_pages=num_pages,
        max_num_seqs=16,
        max_batched_tokens=128,
        bounds=QueueBounds(max_wait_s=1e9),
    )
    tenants = ("heavy", "one", "two", "three")
    extremes = {pair: [0.0, 0.0] for pair in combinations(tenants, 2)}
    queued: dict[str, list[int]] = {tenant: [] for tenant in tenants}
    for _ in range(num_steps):
        for tenant in tenants:
            queued[tenant] = [n for n in queued[tenant] if n not in market.counts.begun_s]
            for _ in range(17 - len(queued[tenant])):
                length = 1000 if tenant == "heavy" else rng.randrange(1, 60)
                request = ask(rng, tenant, length, rng.randrange(1, 60))
                market.offer(request)
                queued[tenant].append(request.id)
        market.step()
        for (one, other), extreme in extremes.items():
            gap = float(market.counts.served[one] - market.counts.served[other])
            extreme[:] = min(extreme[0], gap), max(extreme[1], gap)
    return max(high - low for low, high in extremes.values()), 2 * DECODE_COST * num_pages * 16


def test_giant_prompts_gain_and_lose_nothing_where_rows_are_short() -> None:
    gap, bound = service_gap(1500)
    assert gap <= bound


def test_who_comes_back_has_no_credit_and_no_debt() -> None:
    rng = random.Random(1)
    market = Market(max_num_seqs=4, max_batched_tokens=64)
    market.offer(*(ask(rng, "busy", 30, 10) for _ in range(20)))
    market.step(60)
    before = dict(market.counts.served)
    for _ in range(20):
        market.offer(ask(rng, "back", 30, 10))
        market.offer(ask(rng, "busy", 30, 10))
    market.step(60)
    busy = market.counts.served["busy"] - before["busy"]
    assert market.counts.served["back"] == pytest.approx(busy, rel=0.25)


def backlog(market: Market, rng: random.Random, classes: list[ServiceClass], steps: int) -> None:
    """Every class always has something waiting."""
    for _ in range(steps):
        queued = dict.fromkeys(classes, 0)
        for sequence in waiting_of(market.scheduler):
            queued[sequence.request.service_class] += 1
        for service_class in classes:
            for _ in range(4 - queued[service_class]):
                market.offer(ask(rng, service_class, 40, 20, service_class=service_class))
        market.step()


def test_classes_keep_their_shares_and_lend_what_they_do_not_use() -> None:
    rng = random.Random(2)
    market = Market(num_pages=64, max_num_seqs=8, max_batched_tokens=96)
    backlog(market, rng, [INTERACTIVE, STANDARD, BATCH], scaled(1500, 20_000))
    total = sum(market.counts.by_class.values())
    for service_class, terms in TERMS.items():
        share = market.counts.by_class[service_class] / total
        assert share == pytest.approx(terms.share, abs=0.03), service_class
    market = Market(num_pages=64, max_num_seqs=8, max_batched_tokens=96)
    backlog(market, rng, [STANDARD, BATCH], scaled(1500, 20_000))
    share = market.counts.by_class[STANDARD] / sum(market.counts.by_class.values())
    assert share == pytest.approx(0.75, abs=0.03)
    alone = Market(num_pages=64, max_num_seqs=8, max_batched_tokens=96)
    backlog(alone, rng, [BATCH], 300)
    assert alone.counts.num_steps == 300


def test_a_tenant_orders_by_priority_then_deadline_then_arrival() -> None:
    rng = random.Random(3)
    market = Market(max_num_seqs=1)
    blocker = ask(rng, "t", 8, 4)
    market.offer(blocker)
    market.step()
    last, hurried, first, urgent = (
        ask(rng, "t", 8, 2),
        ask(rng, "t", 8, 2, timeout_s=2.0),
        ask(rng, "t", 8, 2),
        ask(rng, "t", 8, 2, priority=1),
    )
    market.offer(first, last, hurried, urgent)
    market.run()
    order = sorted(market.first_s, key=market.first_s.__getitem__)
    assert order == [r.id for r in (blocker, urgent, hurried, first, last)]


def test_a_giant_prompt_holds_others_up_by_a_chunk() -> None:
    rng = random.Random(4)
    market = Market(num_pages=300, max_num_seqs=8, max_batched_tokens=64)
    market.offer(ask(rng, "giant", 3000, 4))
    market.step(10)
    small = ask(rng, "small", 20, 4)
    market.offer(small)
    market.step(2)
    assert small.id in market.first_s


def test_who_fills_all_rows_with_long_answers_leaves_one_for_others() -> None:
    rng = random.Random(11)
    market = Market(num_pages=800, max_num_seqs=16, max_batched_tokens=128)
    market.offer(*(ask(rng, "heavy", 20, 400) for _ in range(30)))
    market.step(20)
    lights = [ask(rng, "light", 20, 4) for _ in range(3)]
    for light in lights:
        market.offer(light)
        market.step()
        market.step()
        assert light.id in market.first_s
        while light.id not in market.ended:
            market.step()
    assert market.ended == {light.id for light in lights}


def test_each_of_several_others_finds_a_row_at_the_same_moment() -> None:
    """Up to one row in eight is kept for them."""
    rng = random.Random(12)
    market = Market(num_pages=4000, max_num_seqs=32, max_batched_tokens=512)
    others = ["one", "two", "three"]
    market.offer(*(ask(rng, tenant, 20, 400) for tenant in others))
    market.offer(*(ask(rng, "heavy", 20, 400) for _ in range(60)))
    market.step(20)
    num_running = len(market.scheduler.running)
    more = [ask(rng, tenant, 20, 400) for tenant in others]
    market.offer(*more)
    market.step()
    market.step()
    assert num_running == 32 - len(others)
    assert all(request.id in market.first_s for request in more)


def test_beside_one_that_asks_for_more_than_there_is_others_begin_as_if_alone() -> None:
    """Whoever has less than his share of the rows finds one, though his answers before still run
    and the other is as much in turn."""

    def slowest_s(is_beside: bool) -> float:
        rng = random.Random(15)
        market = Market(
            num_pages=4000,
            max_num_seqs=32,
            max_batched_tokens=128,
            bounds=QueueBounds(max_wait_s=1e9),
        )
        lights: list[Generate] = []
        for _ in range(scaled(1200, 20_000)):
            if is_beside and len(market.scheduler.waiting) < 20:
                for _ in range(20):
                    market.offer(ask(rng, "heavy", rng.randrange(4, 12), rng.randrange(10, 100)))
            if rng.random() < 0.1:
                lights.append(ask(rng, "light", 8, rng.randrange(20, 60)))
                market.offer(lights[-1])
            if market.engine.has_work:
                market.step()
            else:
                market.clock.now += 0.01
        waits = sorted(
            market.first_s[light.id] - market.arrived_s[light.id]
            for light in lights
            if light.id in market.first_s
        )
        assert len(waits) >= len(lights) - 2
        return waits[int(0.99 * len(waits))]

    # A step is four times as long with 32 rows.
    assert slowest_s(is_beside=True) <= 4 * slowest_s(is_beside=False)


def test_of_two_in_turn_alike_who_has_less_running_is_first() -> None:
    rng = random.Random(16)
    market = Market(num_pages=800, max_num_seqs=16, max_batched_tokens=64)
    market.offer(*(ask(rng, "heavy", 60, 200) for _ in range(12)))
    market.step(6)
    light = ask(rng, "light", 30, 4)
    market.offer(light)
    market.step()
    assert light.id in market.first_s


def test_what_expired_is_never_begun() -> None:
    """A queue of five seconds and more, and one second to wait."""
    rng = random.Random(5)
    market = Market(max_num_seqs=2, max_batched_tokens=64)
    requests = [ask(rng, f"t{n % 3}", 60, 30, timeout_s=1.0) for n in range(60)]
    market.offer(*requests)
    market.run()
    assert market.clock.now > 1.0
    expired = {n for n, failed in market.failed.items() if failed.code is ErrorCode.EXPIRED}
    assert expired and market.ended
    assert expired | market.ended == {request.id for request in requests}
    for number, begun_s in market.counts.begun_s.items():
        assert begun_s <= market.arrived_s[number] + 1.0
        assert number not in expired


@pytest.mark.parametrize("other", [STANDARD, BATCH])
def test_memory_is_taken_from_batch_first_then_from_who_was_charged_most(
    other: ServiceClass,
) -> None:
    rng = random.Random(6)
    market = Market(num_pages=24, max_num_seqs=8, max_batched_tokens=512)
    for tenant, service_class, num in [("a", STANDARD, 1), ("b", STANDARD, 1), ("c", other, 2)]:
        market.offer(*(ask(rng, tenant, 60, 120, service_class=service_class) for _ in range(num)))
    preempted: list[str] = []
    while market.engine.has_work and not preempted:
        running = {s.request.id: s.request.tenant for s in market.scheduler.running}
        market.step()
        gone = running.keys() - {s.request.id for s in market.scheduler.running} - market.ended
        preempted += [running[number] for number in gone]
    assert preempted == ["c"]


@settings(max_examples=scaled(15, 2000), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(14, 80))
@pytest.mark.soak
def test_nobody_starves(seed: int, num_slots: int, num_pages: int) -> None:
    """Any mix of classes, tenants, priorities, adapters and sizes comes to its end, and a light
    tenant's requests never wait for more than a few turns of the heavy ones."""
    rng = random.Random(seed)
    pool = StubPool(num_slots=num_slots, delay_steps=rng.randrange(3))
    market = Market(num_pages=num_pages, max_num_seqs=6, max_batched_tokens=64, pool=pool)
    submitted: list[int] = []
    for step in range(scaled(300, 1500)):
        if step % 3 == 0:
            request = ask(
                rng,
                rng.choice("aaaabc"),
                rng.randrange(1, 90),
                rng.randrange(1, 40),
                adapter=rng.choice([None, *"uvwxyz"]),
                service_class=rng.choice(list(ServiceClass)),
                priority=rng.randrange(2),
            )
            market.offer(request)
            submitted.append(request.id)
        market.step()
    for _ in range(200_000):
        if not market.engine.has_work:
            break
        market.step()
    refused = {n for n, f in market.failed.items() if f.code is ErrorCode.OVERLOADED}
    assert market.ended | refused == set(submitted)
    assert market.failed.keys() == refused
    market.kv.check_integrity(held=())


@pytest.mark.parametrize("same_tenant", [True, False])
def test_an_adapter_without_room_waits_its_patience_and_one_victim(same_tenant: bool) -> None:
    """One slot, and a stream of requests on the adapter that has it."""
    rng = random.Random(7)
    market = Market(max_num_seqs=4, max_batched_tokens=64, pool=StubPool(num_slots=1))
    max_tokens = 50
    patience_s = TERMS[STANDARD].ttft_s

    def keep_busy() -> None:
        while len(market.scheduler.waiting) < 4:
            market.offer(ask(rng, "busy", 20, rng.randrange(1, max_tokens + 1), adapter="held"))

    for _ in range(50):
        keep_busy()
        market.step()
    late = ask(rng, "busy" if same_tenant else "late", 20, 4, adapter="wanted", priority=1)
    market.offer(late)
    longest_step_s = 0.0
    while late.id not in market.counts.begun_s:
        keep_busy()
        before = market.clock.now
        market.step()
        longest_step_s = max(longest_step_s, market.clock.now - before)
        assert market.clock.now < 60.0
    waited_s = market.counts.begun_s[late.id] - market.arrived_s[late.id]
    assert patience_s <= waited_s
    assert waited_s <= patience_s + (max_tokens + 2) * longest_step_s


def test_adapters_that_are_there_and_the_base_go_on_while_another_waits_for_room() -> None:
    rng = random.Random(8)
    market = Market(max_num_seqs=8, max_batched_tokens=128, pool=StubPool(num_slots=1))
    market.offer(ask(rng, "a", 20, 500, adapter="held"))
    market.step()
    market.offer(*(ask(rng, "a", 20, 5, adapter=f"none{n}") for n in range(40)))
    others = [ask(rng, "b", 20, 5, adapter=rng.choice([None, "held"])) for _ in range(20)]
    market.offer(*others)
    market.step(60)
    assert {request.id for request in others} <= market.ended


def test_a_loaded_adapter_is_charged_to_who_waited_for_it() -> None:
    counters: list[float] = []
    for loaded_bytes in (0, 1 << 30, 2 << 30):
        rng = random.Random(9)
        market = Market()
        measure_speed(market.engine, market.clock)
        market.offer(ask(rng, "a", 20, 2, adapter="x"))
        market.pool.loaded_bytes = loaded_bytes
        market.step()
        account = market.scheduler.policy.account(market.scheduler.running[0])
        counters.append(account.charge[1])
    without, with_one, with_two = counters
    assert with_one > 10 * without
    assert with_two - with_one == pytest.approx(with_one - without, rel=0.01)


@pytest.mark.parametrize("service_class", [INTERACTIVE, STANDARD])
def test_tokens_are_on_time_beside_long_prompts(service_class: ServiceClass) -> None:
    """A step of 512 rows takes half a second here, one of 64 less than a tenth. A stream that is
    ahead of its time may pause, for no longer than `max_token_gap`; it is never late, and the
    prompts get all that is left."""
    rng = random.Random(10)
    market = Market(num_pages=1200, max_num_seqs=8, max_batched_tokens=512, max_gap_ratio=ANY_RATIO)
    stream = ask(rng, "a", 10, 200, service_class=service_class)
    market.offer(stream)
    market.step(10)
    (sequence,) = market.scheduler.running
    longest_s, begin_s = 0.0, market.clock.now
    while stream.id not in market.ended:
        if market.scheduler.num_waiting_tokens < 3000:
            market.offer(ask(rng, "b", 3000, 1, service_class=service_class))
        next_s, before_s = due_s(sequence), market.clock.now
        market.step()
        assert market.clock.now <= next_s + 0.01
        longest_s = max(longest_s, market.clock.now - before_s)
    assert 0.2 < longest_s <= 1.1 * MAX_TOKEN_GAP_S
    num_prompt_tokens = market.counts.served["b"]
    assert num_prompt_tokens * ROW_S > 0.75 * (market.clock.now - begin_s)
