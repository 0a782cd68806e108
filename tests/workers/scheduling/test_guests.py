"""Who lives on what others leave of the device makes them wait for little more than a step."""

from __future__ import annotations

import random

import pytest

from tests.scale import scaled
from tests.workers.counting import Market
from tests.workers.scheduling.test_fairness import ask
from tests.workers.simulation import Simulation, assert_equals_alone, generate, prompt_of
from workers.scheduling.fairness import RECENT_TOKENS
from workers.scheduling.queue_limits import QueueBounds
from workers.wire.protocol import Generate

pytestmark = pytest.mark.usefixtures("both_ways")

GIANT = 1000
NO_BOUNDS = QueueBounds(max_requests=1 << 20, max_tokens=1 << 40, max_wait_s=1e9)


def market(max_num_seqs: int = 32, max_batched_tokens: int = 512) -> Market:
    return Market(
        num_pages=8000,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        row_s=1e-4,
        bounds=NO_BOUNDS,
    )


def guests(of: Market) -> set[str]:
    queue = of.scheduler._queue  # pyright: ignore[reportPrivateUsage]
    accounts = {sequence.account for sequence in of.scheduler.running}
    return {account.tenant for account in accounts if queue.is_guest(account)}


def keep_waiting(of: Market, rng: random.Random, tenant: str, length: int, count: int = 4) -> None:
    while of.scheduler.num_waiting < count:
        of.offer(ask(rng, tenant, length, 20))


def first_tokens_s(share_of_giants: float | None) -> list[float]:
    """Of three tenants that use a sixteenth of the device each; None: beside nobody. The first ten
    seconds do not count: nobody is a guest yet."""
    rng = random.Random(20)
    device = market()
    lights: list[Generate] = []
    due = sorted(
        (rng.uniform(0.0, scaled(40, 400)), f"light{number % 3}")
        for number in range(scaled(300, 3000))
    )
    for at_s, tenant in due:
        while device.clock.now < at_s:
            if share_of_giants is not None:
                length = GIANT if rng.random() < share_of_giants else 32
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


@pytest.mark.parametrize("share_of_giants", [0.0, 0.25, 1.0])
@pytest.mark.soak
def test_beside_giant_prompts_others_begin_nearly_as_soon_as_alone(share_of_giants: float) -> None:
    """A chunk of 512 rows takes 51 ms here, a step without prompts 10 to 13. Ahead, this device has
    computed a step when it is launched, and what it generates is seen when the next one is too."""
    alone, beside = first_tokens_s(None), first_tokens_s(share_of_giants)
    last = int(0.99 * len(alone))
    assert beside[last] <= (2.5 if Simulation.runs_ahead else 1.5) * alone[last]


def test_who_is_alone_has_whole_chunks() -> None:
    rng = random.Random(21)
    device = market()
    for _ in range(200):
        keep_waiting(device, rng, "heavy", GIANT)
        device.step()
    assert device.counts.served["heavy"] > 200 * 500
    assert guests(device) == set()


def test_who_has_no_more_than_is_his_is_nobodys_guest() -> None:
    """Two tenants that always have something waiting; one is worth three times the other."""
    rng = random.Random(22)
    device = market()
    were_guests: set[str] = set()
    for step in range(400):
        for tenant, weight in (("a", 3), ("b", 1)):
            waiting = [s for s in device.scheduler.waiting if s.request.tenant == tenant]
            if len(waiting) < 4:
                device.offer(ask(rng, tenant, 100, 20, weight=weight))
        device.step()
        if step > 100:
            were_guests |= guests(device)
    assert were_guests == set()


def test_a_guest_is_one_no_more_when_the_others_want_what_is_theirs() -> None:
    rng = random.Random(23)
    device = market()
    device.offer(ask(rng, "light", 10, 4000))
    for _ in range(200):
        keep_waiting(device, rng, "heavy", GIANT)
        device.step()
    assert guests(device) == {"heavy"}
    before = dict(device.counts.served)
    while device.counts.served["light"] - before["light"] < 2 * RECENT_TOKENS:
        for tenant in ("heavy", "light"):
            waiting = [s for s in device.scheduler.waiting if s.request.tenant == tenant]
            if len(waiting) < 4:
                device.offer(ask(rng, tenant, GIANT, 20))
        device.step()
    assert guests(device) == set()
    heavy = device.counts.served["heavy"] - before["heavy"]
    light = device.counts.served["light"] - before["light"]
    assert heavy == pytest.approx(light, abs=2000)


def test_a_guest_gives_a_row_to_each_who_finds_none() -> None:
    rng = random.Random(24)
    device = market()
    tenants = [f"light{number}" for number in range(3)]
    for tenant in tenants:
        device.offer(ask(rng, tenant, 10, 4000))
    for _ in range(60):
        device.offer(ask(rng, "heavy", 200, 1000))
    while len(device.scheduler.running) < 29 or guests(device) != {"heavy"}:
        device.step()
    for number in range(9):
        light = ask(rng, tenants[number % 3], 100, 400)
        device.offer(light)
        for _ in range(3):
            device.step()
        assert light.id in device.first_s, number
    assert device.scheduler.num_preemptions >= 4


@pytest.mark.parametrize(("num_running", "num_of_guest"), [((9, 1, 1), 18), ((11, 6, 1), 11)])
def test_rows_kept_for_others_are_for_who_is_nobodys_guest(
    num_running: tuple[int, ...], num_of_guest: int
) -> None:
    """Though the first has more than his share of all, and in the second case so many that the
    guest need not give one up for him."""
    rng = random.Random(27)
    device = market()
    for number, count in enumerate(num_running):
        for _ in range(count):
            device.offer(ask(rng, f"light{number}", 10, 4000))
    for _ in range(60):
        device.offer(ask(rng, "heavy", 400, 1000))
    while len(device.scheduler.running) < 29 or guests(device) != {"heavy"}:
        device.step()
    running = [sequence.request.tenant for sequence in device.scheduler.running]
    assert running.count("heavy") == num_of_guest
    light = ask(rng, "light0", 20, 400)
    device.offer(light)
    for _ in range(3):
        device.step()
    assert light.id in device.first_s
    assert device.scheduler.num_preemptions == 0


def test_a_guest_that_finds_no_row_keeps_nobody_from_one() -> None:
    """The first of two is as much in turn as the guest, the other after it."""
    rng = random.Random(29)
    device = market()
    for tenant in ("light", "other"):
        device.offer(ask(rng, tenant, 10, 4000))
    for _ in range(60):
        device.offer(ask(rng, "heavy", 200, 1000))
    for _ in range(200):
        device.step()
    assert len(device.scheduler.running) == 30
    assert guests(device) == {"heavy"}
    lights = [ask(rng, "light", 200, 400) for _ in range(2)]
    for light in lights:
        device.offer(light)
    for _ in range(3):
        device.step()
    assert all(light.id in device.first_s for light in lights)


def test_no_row_is_taken_from_a_guest_that_has_few() -> None:
    """It has giant prompts, the others long answers."""
    rng = random.Random(26)
    device = market(max_num_seqs=16)

    def keep_giants(num_steps: int) -> int:
        was_guest = 0
        for _ in range(num_steps):
            waiting = [s for s in device.scheduler.waiting if s.request.tenant == "heavy"]
            for _ in range(2 - len(waiting)):
                device.offer(ask(rng, "heavy", GIANT, 2))
            device.step()
            was_guest += guests(device) == {"heavy"}
        return was_guest

    for num_more, num_steps in ((3, 200), (4, 100)):
        for number in range(4 * num_more):
            device.offer(ask(rng, f"light{number % 4}", 10, 2000))
        was_guest = keep_giants(num_steps)
    assert was_guest
    assert len(device.scheduler.running) == 16
    assert device.scheduler.num_preemptions == 0


def test_answers_of_who_gave_up_rows_are_whole() -> None:
    """A giant takes all rows again and again, another asks now and then."""
    rng = random.Random(25)
    simulation = Simulation(num_pages=600, max_num_seqs=8, max_batched_tokens=128, bounds=NO_BOUNDS)
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
        for _ in range(30):
            simulation.step()
    simulation.run()
    assert simulation.scheduler.num_preemptions > 20
    assert_equals_alone(simulation, requests)
    simulation.assert_at_rest()
