"""The scheduler and the engine under a fake clock, with a model made of digests (see
simulator.py)."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.pool.source import AdapterLease, AdapterTurn, AdapterUse, Loading, NoRoom
from adapters.reference import AdapterRef
from tests.workers.no_models import make_loop
from tests.workers.simulation import (
    Simulation,
    StubAdapter,
    StubPool,
    StubTimes,
    assert_equals_alone,
    generate,
    prompt_of,
)
from tests.workers.simulator import VOCAB, SimulatedRunner, alone
from tests.workers.waiting import waiting_of
from workers.execution.engine import MAX_FAILED_STEPS, EngineFailed
from workers.execution.step_input import PendingStep, StepInput
from workers.policies.fairness_policy import (
    CACHED_COST,
    LISTED_COST,
    PREFILL_COST,
    FairnessPolicy,
)
from workers.process.loop import INTEGRITY_PERIOD_S
from workers.scheduling.constraint import NO_CONSTRAINT, Constraint, NoConstraint, Unconstrained
from workers.scheduling.deadlines import MIN_KEPT
from workers.scheduling.sequence import Sequence
from workers.wire.frames import Abort
from workers.wire.protocol import (
    ALL_TOKENS,
    ErrorCode,
    FinishReason,
    Generate,
    OutputKind,
    PromptProgress,
    SamplingParams,
    SequenceOutput,
    ServiceClass,
    TokenLogprobs,
)

pytestmark = pytest.mark.usefixtures("both_ways")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(14, 80), st.integers(16, 200), st.integers(0, 3))
def test_batched_with_strangers_equals_alone(
    seed: int, num_pages: int, max_batched_tokens: int, delay_steps: int
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(
        num_pages=num_pages,
        max_batched_tokens=max_batched_tokens,
        pool=StubPool(num_slots=2, delay_steps=delay_steps),
    )
    shared = prompt_of(rng, 40)
    requests = [
        generate(
            number,
            (shared[: rng.randrange(40)] if rng.random() < 0.6 else [])
            + prompt_of(rng, rng.randrange(1, 50)),
            rng.randrange(1, 60),
            rng.choice([None, "a", "b", "c"]),
            priority=rng.randrange(2),
        )
        for number in range(24)
    ]
    for request in requests:
        simulation.submit(request)
        simulation.step(rng.randrange(3))
    simulation.run()
    assert_equals_alone(simulation, requests)
    simulation.assert_at_rest()


def test_preemption_happens_and_changes_nothing() -> None:
    rng = random.Random(1)
    simulation = Simulation(num_pages=12)
    requests = [generate(n, prompt_of(rng, 30), 60) for n in range(12)]
    simulation.run(*requests)
    assert simulation.scheduler.num_preemptions > 0
    assert_equals_alone(simulation, requests)
    simulation.assert_at_rest()


def test_nobody_takes_the_pages_that_one_before_him_waits_for() -> None:
    rng = random.Random(12)
    simulation = Simulation(num_pages=12, max_batched_tokens=256)
    endless = SamplingParams(max_tokens=60, seed=0, temperature=0.0, ignore_eos=True)
    simulation.submit(msgspec.structs.replace(generate(0, prompt_of(rng, 90)), params=endless))
    simulation.step()
    large, small = generate(1, prompt_of(rng, 100), 4), generate(2, prompt_of(rng, 10), 4)
    simulation.submit(large)
    simulation.submit(small)
    simulation.step(20)
    assert not simulation.outputs[1] and not simulation.outputs[2]
    simulation.run()
    assert_equals_alone(simulation, [large, small])


def test_a_shared_prefix_is_computed_once() -> None:
    rng = random.Random(2)
    simulation = Simulation(num_pages=128, max_batched_tokens=512)
    prefix = prompt_of(rng, 64)
    requests = [generate(n, prefix + prompt_of(rng, 5), 4, "a") for n in range(6)]
    simulation.run(*requests)
    assert_equals_alone(simulation, requests)
    assert sorted(simulation.cached.values()) == [0, 64, 64, 64, 64, 64]


def test_what_a_prompt_finds_of_itself_after_a_preemption_was_not_cached() -> None:
    """It was computed for it, and is paid for as such; what it found at first stays found."""
    rng = random.Random(2)
    simulation = Simulation(num_pages=128, max_batched_tokens=64)
    prefix = prompt_of(rng, 32)
    simulation.run(generate(0, prefix + prompt_of(rng, 5), 1))
    queried, hit = simulation.scheduler.num_queried_tokens, simulation.scheduler.num_hit_tokens
    simulation.submit(generate(1, prefix + prompt_of(rng, 200), 4))
    simulation.step(2)
    simulation.suspend()
    simulation.run()
    assert simulation.scheduler.num_preemptions == 1
    assert simulation.cached[1] == 32
    assert simulation.scheduler.num_queried_tokens - queried == 232
    assert simulation.scheduler.num_hit_tokens - hit == 32


def test_what_is_found_in_the_cache_is_charged_as_such() -> None:
    rng = random.Random(11)
    simulation = Simulation(num_pages=128)
    prefix = prompt_of(rng, 64)
    simulation.run(generate(0, prefix, 1))
    simulation.submit(generate(1, prefix + prompt_of(rng, 16), 1))
    account = simulation.scheduler.policy.account(waiting_of(simulation.scheduler)[0])
    before = account.charge[1]
    simulation.run()
    assert account.charge[1] - before == pytest.approx(64 * CACHED_COST + 16 * PREFILL_COST)


def test_what_a_preemption_loses_is_computed_again_at_no_charge() -> None:
    """One with `prompt_logprobs` finds nothing of itself in the cache."""
    charged: list[float] = []
    for is_preempted in (False, True):
        simulation = Simulation(num_pages=128)
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=0)
        simulation.submit(msgspec.structs.replace(generate(0, [1] * 200), params=params))
        simulation.step(2)
        account = simulation.scheduler.policy.account(simulation.scheduler.running[0])
        if is_preempted:
            simulation.suspend()
        simulation.run()
        charged.append(account.charge[1])
    assert charged == [200.0, 200.0]


def test_prefixes_are_not_shared_across_adapters_domains_or_salts() -> None:
    prompt = prompt_of(random.Random(3), 48)
    simulation = Simulation(num_pages=128)
    requests = [
        generate(0, prompt),
        generate(1, prompt, adapter="a"),
        generate(2, prompt, adapter="b"),
    ]
    requests.append(generate(3, prompt, cache_salt="s"))
    for request in requests:
        simulation.run(request)
    assert set(simulation.cached.values()) == {0}
    simulation.run(generate(4, prompt, adapter="a"))
    assert simulation.cached[4] == 32


def test_a_loading_adapter_is_passed_over() -> None:
    rng = random.Random(4)
    simulation = Simulation(pool=StubPool(num_slots=1, delay_steps=50))
    cold = generate(0, prompt_of(rng, 20), 5, "cold")
    warm = generate(1, prompt_of(rng, 20), 5)
    simulation.submit(cold)
    simulation.submit(warm)
    simulation.step(10)
    assert 1 in simulation.finished
    assert 0 not in simulation.finished
    simulation.run()
    assert_equals_alone(simulation, [cold, warm])


def test_a_broken_adapter_fails_only_its_own() -> None:
    rng = random.Random(5)
    simulation = Simulation(pool=StubPool(num_slots=1, broken=frozenset(["bad"])))
    good = generate(1, prompt_of(rng, 20), 5)
    simulation.run(generate(0, prompt_of(rng, 20), 5, "bad"), good)
    assert simulation.finished[0] is ErrorCode.ADAPTER_UNAVAILABLE
    assert_equals_alone(simulation, [good])
    simulation.assert_at_rest()


class CrowdedPool(StubPool):
    """Idle adapters leave no room until they are laid anew, and a shortage is remembered until the
    next step, as in `AdapterPool`."""

    is_crowded = True
    is_refused = False

    def acquire(
        self, ref: AdapterRef, turn: AdapterTurn | None = None
    ) -> AdapterLease | Loading | NoRoom:
        if self.is_crowded or self.is_refused:
            self.is_refused = True
            self.asked[ref.digest] = -1
            return NoRoom(1)
        return super().acquire(ref, turn)

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        was_crowded, self.is_crowded = self.is_crowded, False
        return was_crowded

    def begin_step(self, in_use: Iterable[AdapterUse]) -> bool:
        self.is_refused = False
        return super().begin_step(in_use)


def test_room_made_for_one_adapter_fails_no_sequence_of_another() -> None:
    simulation = Simulation(pool=CrowdedPool(num_slots=1))
    for number, adapter in enumerate("abc"):
        simulation.submit(generate(number, [1, 2, 3], adapter=adapter))
    simulation.run()
    assert all(isinstance(end, FinishReason) for end in simulation.finished.values())


def test_abort_frees_everything_within_one_step() -> None:
    rng = random.Random(6)
    simulation = Simulation()
    for number in range(12):
        simulation.submit(generate(number, prompt_of(rng, 30), 50, rng.choice([None, "a", "b"])))
    simulation.step(4)
    for number in range(12):
        simulation.engine.abort(0, number)
    simulation.step()
    assert not simulation.engine.has_work
    simulation.assert_at_rest()


def test_what_has_ended_is_not_kept_until_it_would_have_expired() -> None:
    """Nor the prompt with it: a day is the longest that a client may name."""
    rng = random.Random(1)
    simulation = Simulation()
    sequences: list[weakref.ref[Sequence]] = []
    for number in range(400):
        simulation.submit(generate(number, prompt_of(rng, 40), 4, timeout_s=86_400.0))
        sequences.append(weakref.ref(waiting_of(simulation.scheduler)[0]))
        if number % 2:
            simulation.engine.abort(0, number)
        simulation.run()
    gc.collect()
    assert sum(sequence() is not None for sequence in sequences) <= MIN_KEPT + 1


def test_a_load_is_dropped_when_the_last_that_waits_for_it_leaves() -> None:
    rng = random.Random(9)
    simulation = Simulation(pool=StubPool(num_slots=1, delay_steps=50))
    for number, adapter in enumerate(["cold", "cold", "other"]):
        simulation.submit(generate(number, prompt_of(rng, 20), 5, adapter))
    simulation.engine.abort(0, 0)
    assert set(simulation.pool.asked) == {"cold", "other"}
    simulation.engine.abort(0, 1)
    assert set(simulation.pool.asked) == {"other"}
    simulation.run()
    assert set(simulation.pool.slots) == {"other"}


def test_prompt_logprobs_after_a_preemption_have_each_token_once() -> None:
    simulation = Simulation(num_pages=8, max_batched_tokens=4)
    prompt = prompt_of(random.Random(1), 100)
    params = SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0)
    greedy = SamplingParams(max_tokens=60, seed=0, temperature=0.0, ignore_eos=True)
    simulation.submit(msgspec.structs.replace(generate(0, [1] * 15), params=greedy))
    simulation.submit(
        msgspec.structs.replace(generate(1, prompt, kind=OutputKind.SCORE), params=params)
    )
    scored: list[TokenLogprobs] = []
    reached: list[int] = []
    while simulation.engine.has_work:
        for _, event in simulation.engine.step():
            if isinstance(event, PromptProgress):
                reached += [event.num_positions] * (event.id == 1)
            else:
                assert isinstance(event, SequenceOutput)
                scored += event.prompt_logprobs or []
    assert simulation.scheduler.num_preemptions > 0
    assert reached == sorted(set(reached)) and reached[-1] == 100, "a preemption is told of again"
    assert [entry.token for entry in scored] == prompt[1:]
    assert [entry.logprob for entry in scored] == [-float(n) for n in range(1, 100)]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_aborted_prompt_tells_how_far_it_has_come(runs_ahead: bool) -> None:
    """With the step in flight; of a prompt that waits nothing."""
    simulation = Simulation(max_batched_tokens=16, runs_ahead=runs_ahead)
    simulation.submit(generate(0, prompt_of(random.Random(1), 100)))
    simulation.submit(generate(1, prompt_of(random.Random(2), 100)))
    told = [event for _ in range(2) for _, event in simulation.engine.step()]
    at_end = [event for number in (0, 1, 0) for _, event in simulation.engine.abort(0, number)]
    ends = [SequenceOutput(number, [], finish_reason=FinishReason.ABORT) for number in (0, 1)]
    progress = [PromptProgress(0, 16, 0), PromptProgress(0, 32, 0)]
    assert told == progress[: 2 - runs_ahead]
    assert at_end == [*progress[2 - runs_ahead :], *ends]


def test_a_sequence_waits_for_memory_that_a_lease_of_no_sequence_holds() -> None:
    """A probe's: it comes back, so that the sequence is not refused."""
    simulation = Simulation(num_pages=8)
    while not isinstance(lease := simulation.pool.acquire(AdapterRef("probed")), AdapterLease):
        pass
    held = simulation.kv.pool.allocate(6)
    assert held is not None
    simulation.submit(generate(0, [1] * 50, 4))
    assert simulation.engine.step() == []
    lease.release()
    simulation.kv.prefix_cache.release(held)
    simulation.run()
    assert 0 in simulation.finished and simulation.finished[0] in list(FinishReason)


def test_a_loop_keeps_no_request_that_it_refused() -> None:
    """While a step takes long: each may have as many tokens as fit into a frame."""
    simulation = Simulation()
    refused = list[int]()
    loop = make_loop(
        simulation.instance,
        simulation.kv.lock,
        simulation.clock,
        deliver=lambda delivery: refused.extend(connection for connection, _ in delivery),
        status=lambda *_: pytest.fail("the loop does not run"),
    )
    tokens = [VOCAB] * 4711
    loop.post(1, generate(0, tokens))
    assert refused == [1]
    gc.collect()
    holders = [each for each in gc.get_referrers(tokens) if isinstance(each, Generate)]
    assert not holders
    loop.stop()


def test_an_idle_loop_finds_a_page_without_a_holder(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation()
    reports = SimpleQueue[int]()

    def status(_: bool, __: int) -> Any:
        reports.put(simulation.report.num_integrity_failures)

    loop = make_loop(simulation.instance, simulation.kv.lock, simulation.clock, status=status)
    assert simulation.kv.pool.allocate(1)
    thread = Thread(target=loop.run)
    thread.start()
    while reports.get(timeout=60) == 0:
        simulation.clock.now += INTEGRITY_PERIOD_S
        loop.post(0, Abort(0))
    loop.stop()
    thread.join()
    assert "contradicts itself" in caplog.text and "1 pages are used" in caplog.text


def test_a_failing_step_fails_its_sequences_and_no_others() -> None:
    rng = random.Random(7)
    simulation = Simulation()
    simulation.submit(generate(0, prompt_of(rng, 10)))

    class Broken:
        def launch(self, schedule: object) -> None:
            raise RuntimeError("kernel")

    working = simulation.engine.runner
    simulation.engine.runner = Broken()  # pyright: ignore
    simulation.step()
    assert simulation.finished[0] is ErrorCode.INTERNAL
    simulation.engine.runner = working
    later = generate(1, prompt_of(rng, 10))
    simulation.run(later)
    assert_equals_alone(simulation, [later])
    simulation.assert_at_rest()


def test_the_engine_ends_when_no_step_succeeds_any_more() -> None:
    """The process does with it, and whoever waits is served elsewhere."""
    rng = random.Random(8)

    class Dead:
        def launch(self, schedule: object) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    simulation = Simulation()
    simulation.engine.runner = Dead()  # pyright: ignore
    for number in range(MAX_FAILED_STEPS - 1):
        simulation.submit(generate(number, prompt_of(rng, 10)))
        simulation.step()
        assert simulation.finished[number] is ErrorCode.INTERNAL
    simulation.submit(generate(MAX_FAILED_STEPS, prompt_of(rng, 10)))
    with pytest.raises(EngineFailed, match="in a row"):
        simulation.step()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (generate(0, []), ErrorCode.INVALID),
        (generate(0, [VOCAB]), ErrorCode.INVALID),
        (generate(0, [-1]), ErrorCode.INVALID),
        (generate(0, [1], 0), ErrorCode.INVALID),
        (generate(0, [1] * 10, activation=10), ErrorCode.INVALID),
        (generate(0, [1] * 10, activation=-1), ErrorCode.INVALID),
        (generate(0, [1] * 10, 4090), ErrorCode.PROMPT_TOO_LONG),
        (generate(0, [1] * 1000, 100), ErrorCode.PROMPT_TOO_LONG),
    ],
)
def test_what_can_never_run_is_refused(request_: Generate, code: ErrorCode) -> None:
    simulation = Simulation()
    failed = simulation.submit(request_)
    assert failed is not None
    assert failed.code is code
    assert not simulation.engine.has_work


def test_one_that_needs_all_the_memory_runs() -> None:
    simulation = Simulation(num_pages=8)
    refused = simulation.submit(generate(0, [1] * 100, 29))
    assert refused is not None and refused.code is ErrorCode.PROMPT_TOO_LONG
    assert "9 KV pages" in refused.message and "has 8" in refused.message
    greedy = SamplingParams(max_tokens=28, seed=0, temperature=0.0, ignore_eos=True)
    simulation.run(msgspec.structs.replace(generate(1, [1] * 100), params=greedy))
    assert simulation.finished[1] is FinishReason.LENGTH and len(simulation.outputs[1]) == 28


def test_waiting_tokens_are_those_of_prompts_that_are_not_computed() -> None:
    """Of prompts that have begun too: whoever comes waits for these as well."""
    rng = random.Random(10)
    simulation = Simulation(max_batched_tokens=64, max_num_seqs=1)
    seen: list[int] = []
    for number, length in enumerate([150, 20]):
        simulation.submit(generate(number, prompt_of(rng, length), 40))
        seen.append(simulation.scheduler.num_waiting_tokens)
    for _ in range(3):
        simulation.step()
        seen.append(simulation.scheduler.num_waiting_tokens)
    assert seen == [150, 170, 106, 42, 20]


def test_a_biased_token_outside_the_vocabulary_is_refused() -> None:
    simulation = Simulation()
    params = SamplingParams(4, 0, logit_bias={VOCAB: 1.0})
    failed = simulation.submit(Generate(0, "", "model", [1], params, cache_domain="t"))
    assert failed is not None
    assert failed.code is ErrorCode.INVALID


def test_the_step_budget_is_kept_and_decodes_go_first() -> None:
    rng = random.Random(8)
    simulation = Simulation(num_pages=400, max_batched_tokens=32)
    running = generate(0, prompt_of(rng, 10), 200)
    simulation.submit(running)
    simulation.step()
    before = len(simulation.outputs[0])
    simulation.submit(generate(1, prompt_of(rng, 320), 4))
    simulation.step(5)
    assert len(simulation.outputs[0]) == before + 5
    assert max(simulation.ring.last()["num_tokens"]) == 32


class SlowConstraint(Unconstrained):
    """Grammars of requests with seed 1 are never compiled."""

    def open(self, request: Generate, generated: Any) -> Constraint:
        return Pending() if request.params.seed == 1 else NO_CONSTRAINT


class Pending(NoConstraint):
    is_ready = False


@pytest.mark.parametrize("num_waiting", [65, 300])
@pytest.mark.parametrize("reason", ["one adapter", "adapters", "grammar"])
def test_sequences_that_wait_do_not_hide_one_that_can_run(reason: str, num_waiting: int) -> None:
    """All are of one tenant, and the one that can run came last."""
    pool = StubPool(num_slots=4, delay_steps=10**9)
    simulation = Simulation(num_pages=4096, pool=pool, max_num_seqs=8, constraints=SlowConstraint())
    pool.slots["here"], pool.adapters[0] = 0, StubAdapter(StubTimes(None))
    for number in range(num_waiting):
        adapter, seed = None, 0
        match reason:
            case "one adapter":
                adapter = "cold"
            case "adapters":
                adapter = f"cold{number}"
            case _:
                seed = 1
        request = generate(number, [number % 90] * 4, 1, adapter)
        params = msgspec.structs.replace(request.params, seed=seed)
        simulation.submit(msgspec.structs.replace(request, params=params))
    simulation.submit(generate(num_waiting, [5] * 4, 1, "here"))
    simulation.step(3)
    assert [*simulation.finished] == [num_waiting]


class ListedRows(SimulatedRunner):
    """Counts the rows of each step whose whole vocabulary is listed."""

    def launch(self, step: StepInput) -> PendingStep:
        self.num_listed = [
            *getattr(self, "num_listed", []),
            sum(sample.params.lists_vocabulary for sample in step.samples),
        ]
        return super().launch(step)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_step_lists_the_vocabulary_for_one_sequence(num_tokens: int) -> None:
    """Other sequences get their tokens in the meantime, and the tenant is charged for the lists."""
    simulation = Simulation(runner=ListedRows)
    for number in range(8):
        request = generate(number, [number] * 4, num_tokens, tenant="lists")
        params = msgspec.structs.replace(request.params, logprobs=ALL_TOKENS, ignore_eos=True)
        simulation.submit(msgspec.structs.replace(request, params=params))
    other = generate(8, [9] * 4, 6, tenant="other")
    params = msgspec.structs.replace(other.params, ignore_eos=True)
    simulation.submit(msgspec.structs.replace(other, params=params))
    simulation.step(8)
    assert len(simulation.outputs[8]) == 6
    simulation.run()
    assert isinstance(simulation.runner, ListedRows)
    assert max(simulation.runner.num_listed) == 1
    assert len(simulation.finished) == 9
    assert isinstance(simulation.scheduler.policy, FairnessPolicy)
    queue = simulation.scheduler.policy.queue
    one, two = (queue.tenant(ServiceClass.STANDARD, name, 1) for name in ("lists", "other"))
    assert one.counter - two.counter >= (8 * num_tokens - 1) * LISTED_COST


def test_sequences_that_wait_for_the_list_of_another_cost_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many sequences run, each is looked at a few times in a step."""
    num_waiting, num_running, num_calls = 200, 16, 0
    simulation = Simulation(num_pages=4096, max_num_seqs=2 * num_running)

    def submit(number: int, logprobs: int | None) -> None:
        request = generate(number, [number % 90] * 4, 100)
        params = msgspec.structs.replace(request.params, logprobs=logprobs, ignore_eos=True)
        simulation.submit(msgspec.structs.replace(request, params=params))

    for number in range(num_running):
        submit(number, None)
    for number in range(num_running, num_running + num_waiting):
        submit(number, ALL_TOKENS)
    simulation.step(5)
    assert len(simulation.scheduler.running) == num_running + 1
    plain = SamplingParams.lists_vocabulary.fget
    assert plain is not None

    def count(params: SamplingParams) -> bool:
        nonlocal num_calls
        num_calls += 1
        return plain(params)

    monkeypatch.setattr(SamplingParams, "lists_vocabulary", property(count))
    simulation.step()
    assert num_calls <= 2 * (num_waiting + 2 * num_running)


def test_lists_of_the_vocabulary_are_charged_for_generated_tokens_alone() -> None:
    """Neither tokens that the request did not need nor a preemption make them cost more."""
    simulation = Simulation()
    prompts = [prompt_of(random.Random(seed), 20) for seed in range(20)]
    requests = [generate(0, prompt, 800, tenant="lists") for prompt in prompts]
    request = next(each for each in requests if 20 < len(alone(each)) < 200)
    params = msgspec.structs.replace(request.params, logprobs=ALL_TOKENS)
    simulation.submit(msgspec.structs.replace(request, params=params))
    simulation.step(3)
    account = simulation.scheduler.policy.account(simulation.scheduler.running[0])
    simulation.suspend()
    simulation.run()
    assert simulation.finished[0] is FinishReason.STOP
    num_listed = account.charge[1] / LISTED_COST
    assert num_listed == pytest.approx(len(simulation.outputs[0]), rel=0.1, abs=2)
