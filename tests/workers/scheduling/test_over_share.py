"""A tenant over its share makes other tenants wait for little more than a step."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.scale import scaled
from tests.workers.counting import Market, StepCost
from tests.workers.scheduling.test_fairness import ask
from tests.workers.simulation import (
    ANY_RATIO,
    Simulation,
    assert_equals_alone,
    generate,
    prompt_of,
)
from tests.workers.waiting import fair_policy, waiting_of
from workers.policies.over_share import RECENT_TOKENS
from workers.policies.queue_limits import QueueBounds
from workers.wire.protocol import FinishReason, Generate

pytestmark = pytest.mark.usefixtures("both_ways")

LONG_PROMPT = 1000
NO_BOUNDS = QueueBounds(max_requests=1 << 20, max_tokens=1 << 40, max_wait_s=1e9)


def market(max_num_seqs: int = 32, max_batched_tokens: int = 512) -> Market:
    return Market(
        num_pages=8000,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        cost=StepCost(row_s=1e-4),
        bounds=NO_BOUNDS,
        max_gap_ratio=ANY_RATIO,
    )


def over_share(of: Market) -> set[str]:
    policy = fair_policy(of.scheduler)
    tenants = {policy.queue.tenant_of(sequence) for sequence in of.scheduler.running}
    return {each.tenant for each in tenants if policy.over_share.includes(each)}


def keep_waiting(of: Market, rng: random.Random, tenant: str, length: int, count: int = 4) -> None:
    while len(of.scheduler.waiting) < count:
        of.offer(ask(rng, tenant, length, 20))


def first_tokens_s(share_of_long: float | None) -> list[float]:
    """Of three tenants that use a sixteenth of the device each; None: beside nobody. The first ten
    seconds do not count: no tenant is over its share yet."""
    rng = random.Random(20)
    device = market()
    lights: list[Generate] = []
    due = sorted(
        (rng.uniform(0.0, scaled(40, 400)), f"light{number % 3}")
        for number in range(scaled(300, 3000))
    )
    for at_s, tenant in due:
        while device.clock.now < at_s:
            if share_of_long is not None:
                length = LONG_PROMPT if rng.random() < share_of_long else 32
                keep_waiting(device, rng, "heavy", length, count=8)
            if device.engine.has_work:
                device.step()
            else:
                device.clock.now = at_s
        lights.append(ask(rng, tenant, 32, 48))
        device.offer(lights[-1])
    while any(light.id not in device.first_s for light in lights):
        device.step()
    counted = [light.id for light in lights if device.arrived_s[light.id] > 10.0]
    return sorted(device.first_s[n] - device.arrived_s[n] for n in counted)


@pytest.mark.full
@pytest.mark.parametrize("share_of_long", [0.0, 0.25, 1.0])
@pytest.mark.soak
def test_beside_long_prompts_others_begin_nearly_as_soon_as_alone(share_of_long: float) -> None:
    """A chunk of 512 rows takes 51 ms here, a step without prompts 10 to 13. Ahead, this device has
    computed a step when it is launched, and what it generates is seen when the next one is too."""
    alone, beside = first_tokens_s(None), first_tokens_s(share_of_long)
    last = int(0.99 * len(alone))
    assert beside[last] <= (2.5 if Simulation.runs_ahead else 1.5) * alone[last]


def test_who_is_alone_has_whole_chunks() -> None:
    rng = random.Random(21)
    device = market()
    for _ in range(200):
        keep_waiting(device, rng, "heavy", LONG_PROMPT)
        device.step()
    assert device.counts.served["heavy"] > 200 * 500
    assert over_share(device) == set()


def test_a_tenant_within_its_share_is_never_over_it() -> None:
    """Two tenants that always have something waiting; one is worth three times the other."""
    rng = random.Random(22)
    device = market()
    were_over_share: set[str] = set()
    for step in range(400):
        for tenant, weight in (("a", 3), ("b", 1)):
            waiting = [s for s in waiting_of(device.scheduler) if s.request.tenant == tenant]
            if len(waiting) < 4:
                device.offer(ask(rng, tenant, 100, 20, weight=weight))
        device.step()
        if step > 100:
            were_over_share |= over_share(device)
    assert were_over_share == set()


def test_a_tenant_is_no_longer_over_its_share_once_others_take_theirs() -> None:
    rng = random.Random(23)
    device = market()
    device.offer(ask(rng, "light", 10, 4000))
    for _ in range(200):
        keep_waiting(device, rng, "heavy", LONG_PROMPT)
        device.step()
    assert over_share(device) == {"heavy"}
    before = dict(device.counts.served)
    while device.counts.served["light"] - before["light"] < 2 * RECENT_TOKENS:
        for tenant in ("heavy", "light"):
            waiting = [s for s in waiting_of(device.scheduler) if s.request.tenant == tenant]
            if len(waiting) < 4:
                device.offer(ask(rng, tenant, LONG_PROMPT, 20))
        device.step()
    assert over_share(device) == set()
    heavy = device.counts.served["heavy"] - before["heavy"]
    light = device.counts.served["light"] - before["light"]
    assert heavy == pytest.approx(light, abs=2000)


def test_an_over_share_tenant_gives_a_slot_to_each_sequence_that_finds_none() -> None:
    rng = random.Random(24)
    device = market()
    tenants = [f"light{number}" for number in range(3)]
    device.offer(*(ask(rng, tenant, 10, 4000) for tenant in tenants))
    device.offer(*(ask(rng, "heavy", 200, 1000) for _ in range(60)))
    while len(device.scheduler.running) < 29 or over_share(device) != {"heavy"}:
        device.step()
    for number in range(9):
        light = ask(rng, tenants[number % 3], 100, 400)
        device.offer(light)
        device.step(3)
        assert light.id in device.first_s, number
    assert device.scheduler.num_preemptions >= 4


@pytest.mark.parametrize(("num_running", "num_heavy"), [((9, 1, 1), 18), ((11, 6, 1), 11)])
def test_slots_are_kept_for_tenants_within_their_share(
    num_running: tuple[int, ...], num_heavy: int
) -> None:
    """Though the first has more than its share of all, and in the second case so many that the
    over-share tenant need not give one up for it."""
    rng = random.Random(27)
    device = market()
    for number, count in enumerate(num_running):
        device.offer(*(ask(rng, f"light{number}", 10, 4000) for _ in range(count)))
    device.offer(*(ask(rng, "heavy", 400, 1000) for _ in range(60)))
    while len(device.scheduler.running) < 29 or over_share(device) != {"heavy"}:
        device.step()
    running = [sequence.request.tenant for sequence in device.scheduler.running]
    assert running.count("heavy") == num_heavy
    light = ask(rng, "light0", 20, 400)
    device.offer(light)
    device.step(3)
    assert light.id in device.first_s
    assert device.scheduler.num_preemptions == 0


def test_an_over_share_tenant_without_a_slot_keeps_no_other_from_one() -> None:
    """The first of two is as much in turn as the over-share tenant, the other after it."""
    rng = random.Random(29)
    device = market()
    device.offer(*(ask(rng, tenant, 10, 4000) for tenant in ("light", "other")))
    device.offer(*(ask(rng, "heavy", 200, 1000) for _ in range(60)))
    device.step(200)
    assert len(device.scheduler.running) == 30
    assert over_share(device) == {"heavy"}
    lights = [ask(rng, "light", 200, 400) for _ in range(2)]
    device.offer(*lights)
    device.step(3)
    assert all(light.id in device.first_s for light in lights)


def test_no_slot_is_taken_from_an_over_share_tenant_that_has_few() -> None:
    """It has long prompts, the others long answers."""
    rng = random.Random(26)
    device = market(max_num_seqs=16)

    def keep_long_prompts(num_steps: int) -> int:
        num_over_share = 0
        for _ in range(num_steps):
            waiting = [s for s in waiting_of(device.scheduler) if s.request.tenant == "heavy"]
            device.offer(*(ask(rng, "heavy", LONG_PROMPT, 2) for _ in range(2 - len(waiting))))
            device.step()
            num_over_share += over_share(device) == {"heavy"}
        return num_over_share

    for num_more, num_steps in ((3, 200), (4, 100)):
        device.offer(*(ask(rng, f"light{number % 4}", 10, 2000) for number in range(4 * num_more)))
        num_over_share = keep_long_prompts(num_steps)
    assert num_over_share
    assert len(device.scheduler.running) == 16
    assert device.scheduler.num_preemptions == 0


@pytest.mark.full
def test_answers_of_who_gave_up_rows_are_whole() -> None:
    """A giant takes all rows again and again, another asks now and then."""
    rng = random.Random(25)
    simulation = Simulation(
        num_pages=600,
        max_num_seqs=8,
        max_batched_tokens=128,
        bounds=NO_BOUNDS,
        max_gap_ratio=ANY_RATIO,
    )
    requests: list[Generate] = []

    def submit(tenant: str, length: int, max_tokens: int) -> None:
        number = len(requests)
        request = generate(number, prompt_of(rng, length), max_tokens, tenant=tenant)
        requests.append(request)
        assert simulation.submit(request) is None

    for _ in range(100):
        submit("heavy", 150, 40)
    for _ in range(30):
        for _ in range(3):
            submit("light", 10, 3)
        simulation.step(30)
    simulation.run()
    assert simulation.scheduler.num_preemptions > 20
    assert_equals_alone(simulation, requests)
    simulation.assert_at_rest()


def test_a_prompt_that_gave_up_its_slot_gets_no_tokens_without_one() -> None:
    """It had not computed a page when it gave up its slot, so it awaits the page that it was to
    compute itself."""
    rng = random.Random(31)
    simulation = Simulation(
        num_pages=600, max_num_seqs=4, max_batched_tokens=12, bounds=NO_BOUNDS, runs_ahead=False
    )
    requests: list[Generate] = []

    def submit(tenant: str, length: int, max_tokens: int) -> None:
        request = generate(len(requests), prompt_of(rng, length), max_tokens, tenant=tenant)
        endless = msgspec.structs.replace(request.params, ignore_eos=True)
        requests.append(msgspec.structs.replace(request, params=endless))
        assert simulation.submit(requests[-1]) is None

    submit("heavy", 3600, 400)
    simulation.step()
    while simulation.scheduler.running[0].is_pending:
        simulation.step()
    for tenant, length in (("light", 3), ("light", 3), ("heavy", 100)):
        submit(tenant, length, 100)
        simulation.step()
    assert len(simulation.scheduler.running) == 4
    submit("other", 2, 4)
    simulation.step()
    assert simulation.scheduler.num_preemptions == 1
    simulation.run()
    assert all(end is FinishReason.LENGTH for end in simulation.finished.values())
