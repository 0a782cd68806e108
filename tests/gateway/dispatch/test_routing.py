"""Which worker is picked."""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from adapters.reference import AdapterRef
from gateway.dispatch.routing import ADAPTER_BYTES, best, predict, weigh
from gateway.dispatch.run import Work
from gateway.dispatch.standings import NUM_DRAWN, STALE_S, Report, Standing, Workers
from workers.wire.protocol import Generate, SamplingParams
from workers.wire.queue_wait import ASSUMED_ANSWER_TOKENS
from workers.wire.status import AdapterStatus, ModelStatus, WorkerStatus

RATE = 1000.0
STEP_S = 0.02
ANSWER_TOKENS = 100
MB = 1 << 20
IDLE = ModelStatus(
    *("m", "m", 0, 0, 100, 100, 0, 0, 0, 0),
    num_bytes=200 * MB,
    max_num_seqs=8,
    load_s=2.0,
    prefill_tokens_per_s=RATE,
    decode_step_s=STEP_S,
    answer_tokens=ANSWER_TOKENS,
)
OTHER = msgspec.structs.replace(IDLE, digest="other")


def worker(
    *adapters: tuple[str, str],
    at: float = 0.0,
    others: list[ModelStatus] | None = None,
    name: str = "w",
    leases: int = 0,
    **model: object,
) -> Standing:
    """adapters: (digest, tier), of 8 MiB. Its map says that half of 400 MiB is free."""
    status = WorkerStatus(
        name,
        False,
        [msgspec.structs.replace(IDLE, **model), *(others or [])],
        [AdapterStatus(digest, tier, 8 * MB, leases, False) for digest, tier in adapters],
        *(400 * MB, "k.", {}, 0, 0.0),
    )
    return Standing(Report.of(status, {}), at)


def work(num_tokens: int = 100, adapter: str | None = None, model: str = "m") -> Work:
    ref = None if adapter is None else AdapterRef(adapter)
    return Work.of([Generate(0, "", model, [0] * num_tokens, SamplingParams(1, 0), "", ref)])


def chosen(
    asked: Work, workers: list[Standing], cached: dict[int, int] | None = None, now: float = 0.0
) -> set[int]:
    """All that are picked in fifty tries."""
    known = together(workers)
    return {best(weigh(asked, known, cached or {}, now, Random(seed))) for seed in range(50)}


def together(standings: list[Standing]) -> Workers[int]:
    workers: Workers[int] = Workers()
    for number, standing in enumerate(standings):
        workers.put(number, standing)
    return workers


def seconds(asked: Work, where: Standing, num_cached: int = 0, now: float = 0.0) -> float:
    return predict(asked, where, num_cached, ADAPTER_BYTES, now)


def near(value: float, expected: float) -> bool:
    return abs(value - expected) < 1e-6


def test_the_terms() -> None:
    idle = worker()
    assert near(seconds(work(), idle), 100 / RATE)
    assert near(seconds(work(), idle, num_cached=96), 4 / RATE)
    assert near(seconds(work(), worker(num_waiting_tokens=500)), 600 / RATE)
    busy = [msgspec.structs.replace(OTHER, num_waiting_tokens=300)]
    assert near(seconds(work(), worker(others=busy)), 400 / RATE)
    answer_s = ANSWER_TOKENS * STEP_S
    assert near(seconds(work(), worker(num_running=7)), 100 / RATE)
    assert near(seconds(work(), worker(num_running=8, num_waiting=1)), 0.1 + 2 * answer_s / 8)
    short = worker(num_running=8, answer_tokens=16.0)
    assert near(seconds(work(), short), 0.1 + 16 * STEP_S / 8)
    unknown = worker(num_running=8, answer_tokens=0.0)
    assert near(seconds(work(), unknown), 0.1 + ASSUMED_ANSWER_TOKENS * STEP_S / 8)
    copy_s = 1e-3 + ADAPTER_BYTES / 2.5e9
    lora = work(adapter="a")
    assert near(seconds(lora, worker(("a", "device"))), 0.1)
    assert near(seconds(lora, worker(("a", "loading"))), 0.1 + copy_s / 2)
    assert near(seconds(lora, worker(("a", "host"))), 0.1 + copy_s)
    assert near(seconds(lora, worker()), 0.1 + copy_s + 1e-3 + ADAPTER_BYTES / 4e8)
    crowd_s = answer_s * ADAPTER_BYTES / IDLE.num_bytes
    assert near(seconds(lora, worker(("a", "device"), num_running=1)), 0.1 + crowd_s)
    assert near(seconds(lora, worker(("a", "device"), num_running=1, leases=1)), 0.1)
    assert near(seconds(work(), worker(tier="loading")), 0.1 + 1.0)
    assert near(seconds(work(), worker(tier="host")), 0.1 + 2.0)
    assert near(seconds(work(), worker(tier="draining")), 0.1 + 2 * 2.0)
    full = worker(tier="host", num_bytes=300 * MB, others=[OTHER])
    assert near(seconds(work(), full), 0.1 + 2 * 2.0)
    running = [msgspec.structs.replace(OTHER, num_running=1)]
    draining = worker(tier="host", num_bytes=300 * MB, others=running)
    assert near(seconds(work(), draining), 0.1 + 2 * 2.0 + answer_s)
    awaited = [msgspec.structs.replace(OTHER, num_waiting=1, tier="cold", load_s=3.0)]
    assert near(seconds(work(), worker(tier="host", others=awaited)), 0.1 + 3.0 + 2.0)


def test_the_soonest_is_picked() -> None:
    assert chosen(work(), [worker(num_waiting_tokens=300), worker(num_waiting_tokens=100)]) == {1}
    assert chosen(work(), [worker(), worker()]) == {0, 1}
    assert chosen(work(), [worker(), worker()], cached={1: 96}) == {1}
    lora = work(adapter="a")
    assert chosen(lora, [worker(), worker(("a", "host")), worker(("a", "device"))]) == {2}
    assert chosen(work(), [worker(tier="cold"), worker(num_waiting_tokens=1500)]) == {1}
    assert chosen(work(), [worker(tier="cold"), worker(num_waiting_tokens=2500)]) == {0}


def test_who_has_the_prompt_is_left_only_for_much_less() -> None:
    def beside_idle(num_waiting_tokens: int) -> set[int]:
        busy = worker(num_waiting_tokens=num_waiting_tokens)
        return chosen(work(), [busy, worker()], cached={0: 96})

    assert beside_idle(116) == {0} and beside_idle(166) == {1}


def test_who_has_most_of_the_prompt_is_found_among_those_who_have_some() -> None:
    crowd = dict.fromkeys(range(1, 200), 16)
    assert chosen(work(), [worker()] * 200, cached={0: 96, **crowd}) == {0}


def test_who_could_not_load_an_adapter_is_not_near_it() -> None:
    failed = AdapterStatus("a", "store", 0, 0, False, error="adapter.load.failed")
    status = WorkerStatus("w", False, [IDLE], [failed], 0, "", {}, 0, 0.0)
    where = Standing(Report.of(status, {}), 0.0)
    assert not where.near and where.tier("a") == ""


def test_a_worker_that_has_measured_nothing_is_believed_to_be_as_fast() -> None:
    status = WorkerStatus("w", False, [IDLE], [], 0, "", {}, 0, 0.0)
    model = msgspec.structs.replace(IDLE, prefill_tokens_per_s=0.0)
    status = msgspec.structs.replace(status, models=[model])
    assert near(seconds(work(), Standing(Report.of(status, {"m": 5 * RATE}), 0.0)), 0.1 / 5)


def test_one_holder_among_thousands_is_found() -> None:
    workers = [worker() for _ in range(3000)]
    workers[1234] = worker(("a", "device"))
    assert chosen(work(adapter="a"), workers) == {1234}
    assert chosen(work(), workers, cached={77: 64}) == {77}
    cold = [worker(tier="cold") for _ in range(3000)]
    cold[5] = worker()
    assert chosen(work(), cold) == {5}


def test_a_choice_among_thousands_looks_at_few() -> None:
    workers = together([worker(("a", "device"), ("b", "host"), name=f"w{i}") for i in range(3000)])
    looks = 0

    def is_able(_: int) -> bool:
        nonlocal looks
        looks += 1
        return True

    for seed in range(100):
        for adapter in (None, "a", "b"):
            best(weigh(work(adapter=adapter), workers, {7: 64}, 0.0, Random(seed), is_able))
    assert looks <= 300 * 4 * NUM_DRAWN


def test_who_is_not_able_is_not_picked() -> None:
    workers = together([worker(("a", "device")), *(worker() for _ in range(500))])
    for number in (0, 77, 500):
        for seed in range(5):
            for adapter in (None, "a"):
                asked = work(adapter=adapter)
                able = {number}.__contains__
                assert best(weigh(asked, workers, {3: 64}, 0.0, Random(seed), able)) == number


def test_a_stale_worker_is_the_last() -> None:
    stale = worker(("a", "device"), at=-STALE_S - 1)
    busy = worker(num_waiting_tokens=10**6, num_running=8)
    assert chosen(work(adapter="a"), [stale, busy], cached={0: 96}) == {1}
    assert chosen(work(), [stale, worker(num_waiting_tokens=10**5, at=-STALE_S - 1)]) == {0}


def test_what_was_sent_counts_and_fades() -> None:
    where = worker()
    where.send(work(400), 100, 1.0)
    assert near(seconds(work(), where, now=1.0), 0.1 + 0.3)
    assert near(seconds(work(), where, now=1.2), 0.1 + 0.1)
    assert near(seconds(work(), where, now=9.0), 0.1)
    where.send(work(400), 0, 9.0)
    assert near(seconds(work(), where, now=9.0), 0.1 + 0.4)
    for _ in range(6):
        where.send(work(1), 0, 10.0)
    assert near(seconds(work(), where, now=99.0), 0.1 + ANSWER_TOKENS * STEP_S / 8)
    two = work(1)
    two.num_sequences = 2
    where.send(two, 0, 98.0)
    assert near(seconds(work(), where, now=99.0), 0.1 + 3 * ANSWER_TOKENS * STEP_S / 8)
    where.num_more = 0
    assert near(seconds(work(), where, now=99.0), 0.1)
    assert where.tier("a") == ""
    where.send(work(adapter="a"), 0, 99.0)
    assert where.tier("a") == "loading"
    where = Standing(worker().report, 0.0, num_gateways=3)
    where.send(work(400), 100, 0.0)
    assert near(seconds(work(), where), 0.1 + 3 * 0.3)


def test_what_waits_for_its_limits_counts_until_then_and_does_not_fade() -> None:
    """A report in the meantime changes nothing of it."""
    row_s = ANSWER_TOKENS * STEP_S / 8
    workers = together([worker(num_running=7)])
    with workers.claimed(0, work(400), 100):
        assert near(seconds(work(), workers.standings[0], now=1.0), 0.1 + 0.3 + row_s)
        workers.put(0, worker(num_running=7))
        assert near(seconds(work(), workers.standings[0], now=9.0), 0.1 + 0.3 + row_s)
        workers.standings[0].num_gateways = 2.0
        assert near(seconds(work(), workers.standings[0], now=9.0), 0.1 + 0.6 + 2 * row_s)
    assert near(seconds(work(), workers.standings[0], now=9.0), 0.1)


def test_a_base_model_that_was_sent_for_comes_before_others() -> None:
    where = worker(tier="host", others=[msgspec.structs.replace(OTHER, tier="host", load_s=3.0)])
    where.send(work(), 0, 0.0)
    assert near(where.wait_s("m"), 1.0)
    assert near(where.wait_s("other"), 2.0 + 3.0)


def test_gateways_agree_where_what_is_new_goes() -> None:
    workers = [worker(name=f"w{i}") for i in range(100)]
    for adapter in "abc":
        asked = work(adapter=adapter)
        assert len(chosen(asked, workers)) <= 2
    cold = [worker(name=f"w{i}", tier="cold") for i in range(100)]
    assert len(chosen(work(), cold)) <= 2


def test_a_hot_adapter_spreads_as_queues_grow() -> None:
    def num_holders(requests_per_s: float, num_requests: int, seed: int = 1) -> int:
        workers = together([worker(("a", "device")), *(worker() for _ in range(9))])
        rng, lora = Random(seed), work(adapter="a")
        for number in range(num_requests):
            now = number / requests_per_s
            index = best(weigh(lora, workers, {}, now, rng))
            workers.send(index, lora, 0, now)
        return sum(1 for each in workers.all if workers.standings[each].tier("a"))

    assert num_holders(requests_per_s=5, num_requests=7) == 1
    spread = {num_holders(requests_per_s=30, num_requests=20, seed=seed) for seed in range(20)}
    assert spread <= {3, 4, 5, 6}
    assert num_holders(requests_per_s=100, num_requests=70) >= 9


def test_gateways_that_know_the_same_do_not_herd() -> None:
    """Twenty gateways, none of which knows what the others send: no worker gets a fifth."""
    counts = [0] * 50
    for seed in range(20):
        rng = Random(seed)
        workers = together([worker(num_waiting_tokens=i % 7) for i in range(50)])
        for _ in range(10):
            index = best(weigh(work(), workers, {}, 0.0, rng))
            workers.send(index, work(), 0, 0.0)
            counts[index] += 1
    assert max(counts) < 40


tiers = st.sampled_from(["device", "loading", "host"])
standings = st.builds(
    lambda adapters, at, model: worker(*adapters.items(), at=at, **model),
    st.dictionaries(st.sampled_from("abc"), tiers),
    st.sampled_from([0.0, -2.0, -STALE_S - 1]),
    st.fixed_dictionaries(
        {
            "num_waiting_tokens": st.integers(0, 10**5),
            "num_running": st.integers(0, 9),
            "num_waiting": st.integers(0, 9),
            "tier": st.sampled_from(["device", "loading", "draining", "host", "cold"]),
            "prefill_tokens_per_s": st.sampled_from([0.0, 10.0, 1e5]),
            "max_num_seqs": st.sampled_from([0, 1, 8]),
        }
    ),
)


@given(
    st.lists(standings, min_size=1, max_size=8),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from(["m", "unheard of"]),
    st.integers(0, 2**32),
)
def test_any_report_is_answered_and_alike(
    workers: list[Standing], adapter: str | None, model: str, seed: int
) -> None:
    cached = {index: 16 * (index % 3) for index in range(len(workers))}
    asked, known = work(64, adapter, model), together(workers)
    index = best(weigh(asked, known, cached, 0.0, Random(seed)))
    assert index == best(weigh(asked, known, cached, 0.0, Random(seed)))
    assert not workers[index].is_stale(0.0) or all(each.is_stale(0.0) for each in workers)
    for each in workers:
        assert 0.0 <= seconds(asked, each) < 1e6


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(standings, st.none(), st.sampled_from("abc")),
        ),
        max_size=30,
    )
)
def test_who_holds_what_is_known(changes: list[tuple[int, Standing | str | None]]) -> None:
    """After workers came, told, were sent adapters and went."""
    workers: Workers[int] = Workers()
    for number, change in changes:
        if isinstance(change, Standing):
            workers.put(number, change)
        elif number in workers.standings:
            if change is None:
                workers.remove(number)
            else:
                workers.send(number, work(adapter=change), 0, 0.0)
    there = workers.standings
    assert sorted(workers.all) == sorted(there)
    for adapter in "abc":
        on_device = [n for n, each in there.items() if each.tier(adapter) == "device"]
        assert sorted(workers.holders(adapter)) == sorted(on_device)
        near = [n for n, each in there.items() if each.tier(adapter)]
        assert sorted(workers.near(adapter)) == sorted(near)
    for model in ("m", "unheard of"):
        ready = [n for n, each in there.items() if not each.model(model).wait_s]
        assert sorted(workers.resident(model)) == sorted(ready)
    pools = (workers._holders, workers._near, workers._resident)
    assert all(len(list(pool)) for known in pools for pool in known.values())
