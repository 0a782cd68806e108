"""A step is launched while the one before it is in flight: what comes of it is what would have come
of it in turn, whatever ended meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.page_key import PAGE_TOKENS
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from tests.workers.simulation import (
    ANY_RATIO,
    Simulation,
    StubPool,
    TokenCount,
    generate,
    prompt_of,
)
from tests.workers.simulator import END, VOCAB, Late, SimulatedRunner, alone
from tests.workers.waiting import fair_policy, waiting_of
from workers.execution.step_input import PendingStep, SequenceResult, StepInput, StepOutput
from workers.observe.status import cached_pages
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    SamplingParams,
    ServiceClass,
    TokenLogprobs,
)


def asked(
    rng: random.Random, number: int, shared: list[int], adapters: list[str | None]
) -> Generate:
    """Most end with one of several stop tokens, the others by their length."""
    prompt = shared[: rng.randrange(len(shared))] + prompt_of(rng, rng.randrange(1, 50))
    adapter = rng.choice(adapters)
    activation = rng.choice([0, rng.randrange(len(prompt))]) if adapter else 0
    params = SamplingParams(
        rng.choice([1, 2, 60]),
        0,
        temperature=0.0,
        stop_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(8))),
        ignore_eos=rng.random() < 0.5,
    )
    request = generate(number, prompt, 1, adapter, activation=activation)
    return msgspec.structs.replace(request, params=params)


def answer(request: Generate) -> tuple[list[int], FinishReason]:
    """What the sequence must generate, whatever else runs."""
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {END})
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        sofar = msgspec.structs.replace(
            request,
            tokens=request.tokens + tokens,
            params=SamplingParams(1, 0),
        )
        tokens += alone(sofar)
        if tokens[-1] in stops:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(14, 80), st.integers(16, 200))
def test_tokens_are_the_same_under_stops_aborts_and_preemption(
    seed: int, num_pages: int, max_batched_tokens: int
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(
        num_pages=num_pages,
        max_batched_tokens=max_batched_tokens,
        pool=StubPool(num_slots=2, delay_steps=rng.randrange(3)),
        runs_ahead=True,
        observe=TokenCount,
    )
    shared = prompt_of(rng, 40)
    requests = [asked(rng, number, shared, [None, "a", "b", "c"]) for number in range(24)]
    aborted: set[int] = set()
    for request in requests:
        simulation.submit(request)
        simulation.step(rng.randrange(4))
        if rng.random() < 0.3:
            unended = [n for n in range(request.id + 1) if n not in simulation.finished]
            if unended:
                aborted.add(number := rng.choice(unended))
                simulation.engine.abort(0, number)
        if rng.random() < 0.1:
            simulation.suspend()
    simulation.run()
    for request in requests:
        tokens, reason = answer(request)
        got = simulation.outputs[request.id]
        if request.id in aborted:
            assert got == tokens[: len(got)] and request.id not in simulation.finished
        else:
            assert got == tokens and simulation.finished[request.id] is reason
    assert simulation.num_counted == sum(map(len, simulation.outputs.values()))
    simulation.assert_at_rest()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_a_row_for_nothing_leaves_no_trace(seed: int) -> None:
    """Not in the prefix cache, in what is charged, or in what is counted; with memory for all."""

    def run(runs_ahead: bool) -> tuple[object, ...]:
        rng = random.Random(seed)
        simulation = Simulation(num_pages=400, runs_ahead=runs_ahead, observe=TokenCount)
        requests = [asked(rng, number, [0], [None, "a"]) for number in range(16)]
        for request in requests:
            simulation.submit(request)
        account = simulation.scheduler.policy.account(waiting_of(simulation.scheduler)[0])
        simulation.run()
        simulation.assert_at_rest()
        cache = simulation.kv.prefix_cache
        told = {
            pages.added[at : at + 8]
            for pages in cached_pages(simulation.engine)
            for at in range(0, len(pages.added), 8)
        }
        counts = simulation.num_counted, simulation.kv.idle.num_pages, account.charge[1]
        return simulation.outputs, simulation.finished, set(cache.keys), told, counts

    assert run(True) == run(False)


class Watched(SimulatedRunner):
    """Notes what the engine does when."""

    def launch(self, step: StepInput) -> PendingStep:
        launched = super().launch(step)
        number = self.num_steps
        log.append(f"launch {number}")

        def result():
            log.append(f"collect {number}")
            return launched.result()

        return Late(result)


log: list[str] = []


def test_the_next_step_is_launched_before_the_last_is_collected() -> None:
    log.clear()
    simulation = Simulation(runner=Watched, runs_ahead=True)
    simulation.run(generate(0, [1, 2, 3], 3))
    assert log == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]


def test_another_engine_has_the_device_to_itself() -> None:
    log.clear()
    simulation = Simulation(runner=Watched, runs_ahead=True)
    simulation.submit(generate(0, [1, 2, 3], 2))
    while simulation.engine.has_work:
        simulation.engine.step(drain=list)
    assert log == ["launch 1", "collect 1", "launch 2", "collect 2"]


@dataclass
class Broken(SimulatedRunner):
    """The device finds out when a step is computed, not when it is launched."""

    breaks_at: int = 0

    def launch(self, step: StepInput) -> PendingStep:
        launched = super().launch(step)
        is_broken = self.num_steps == self.breaks_at

        def result():
            computed = launched.result()
            if is_broken:
                self.spoil(computed)
            return computed

        return Late(result)

    def spoil(self, computed: StepOutput) -> None:
        raise RuntimeError("kernel")


def test_a_step_that_fails_in_flight_fails_its_sequences_and_no_others() -> None:
    simulation = Simulation(runner=Broken, runs_ahead=True)
    assert isinstance(simulation.runner, Broken)
    simulation.runner.breaks_at = 4
    first, later = generate(0, [1, 2, 3], 40), generate(1, [4, 5, 6], 8)
    simulation.submit(first)
    simulation.step(4)
    simulation.run(later)
    assert simulation.finished[0] is ErrorCode.INTERNAL
    assert simulation.outputs[0] == alone(first)[:3]
    assert simulation.outputs[1] == alone(later)
    simulation.assert_at_rest()


class NoNumbers(Broken):
    """In one step, of the first sequence."""

    def spoil(self, computed: StepOutput) -> None:
        computed.sequences[0] = SequenceResult(error=ErrorCode.LOGITS_NAN)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_logits_that_are_no_numbers_end_their_sequence_alone(runs_ahead: bool) -> None:
    simulation = Simulation(runner=NoNumbers, runs_ahead=runs_ahead)
    assert isinstance(simulation.runner, NoNumbers)
    simulation.runner.breaks_at = 4
    broken, stranger = generate(0, [1, 2, 3], 40), generate(1, [4, 5, 6], 8)
    simulation.run(broken, stranger)
    assert simulation.finished[0] is ErrorCode.LOGITS_NAN
    assert simulation.outputs[0] == alone(broken)[:3]
    assert simulation.outputs[1] == alone(stranger)
    simulation.assert_at_rest()


@dataclass
class Device(SimulatedRunner):
    """Computes beside the host: a step takes its time when it is waited for, and no two at once."""

    free_s: float = 0.0

    def launch(self, step: StepInput) -> PendingStep:
        now = self.clock.now
        launched = super().launch(step)
        self.clock.now = now
        self.free_s = max(self.free_s, now) + step_s(int(step.counts.sum()))
        end_s = self.free_s

        def result():
            self.clock.now = max(self.clock.now, end_s)
            return launched.result()

        return Late(result)


def step_s(num_rows: int) -> float:
    return 0.02 + 0.0005 * num_rows


def test_a_prompt_fills_the_steps_that_a_stream_leaves_and_makes_no_token_late() -> None:
    """A step begins when those in flight have ended, and its token is due after theirs."""
    simulation = Simulation(
        num_pages=400,
        max_batched_tokens=2000,
        max_token_gap_s=60.0,
        max_gap_ratio=ANY_RATIO,
        runner=Device,
        runs_ahead=True,
    )
    for num_rows in range(1, 200):
        fair_policy(simulation.scheduler).step_time.record(num_rows, 0, step_s(num_rows))
    requests = (
        generate(0, [token], 60, service_class=ServiceClass.INTERACTIVE) for token in range(VOCAB)
    )
    stream = next(request for request in requests if len(alone(request)) == 60)
    simulation.submit(stream)
    while len(simulation.outputs[0]) < 3:
        simulation.step()
    simulation.submit(
        generate(1, prompt_of(random.Random(1), 4000), 1, service_class=ServiceClass.INTERACTIVE)
    )
    late_s: list[float] = []
    while not simulation.outputs[1]:
        simulation.step()
        # The first is due after a second, each later one a tenth after the one before.
        late_s.append(simulation.clock.now - 0.9 - 0.1 * len(simulation.outputs[0]))
    assert max(late_s) < 1e-4
    assert late_s[2:-1] == pytest.approx([0.0] * len(late_s[2:-1]), abs=1e-3), "nothing is left"
    assert len(late_s) > 10


def test_what_is_in_flight_counts_when_its_model_has_to_leave() -> None:
    simulation = Simulation(runs_ahead=True)
    requests = (generate(0, [token] * 2 * PAGE_TOKENS, 30) for token in range(VOCAB))
    request = next(request for request in requests if len(alone(request)) == 30)
    simulation.submit(request)
    simulation.step(5)
    assert len(simulation.outputs[0]) == 4, "one is in flight"
    simulation.suspend()
    assert len(simulation.outputs[0]) == 5
    runner = simulation.engine.runner
    simulation.engine.set_runner(None)
    assert runner is not None
    simulation.step()
    simulation.engine.set_runner(runner)
    simulation.run()
    assert simulation.outputs[0] == alone(request)
    simulation.assert_at_rest()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", {"a": {"rank": 4}, "b": {"rank": 8}})


def test_a_real_worker_draws_the_same_tokens(llama: Setup) -> None:
    """Penalties, biases, stops, seeds, log-probabilities, late activations and preemption."""
    rng = random.Random(5)
    requests: list[Generate] = []
    for number in range(24):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(2, 40))]
        params = SamplingParams(
            rng.choice([1, 60, 120]),
            seed=number,
            temperature=rng.choice([0.0, 1.0, 4.0]),
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 1.0]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logit_bias=rng.choice([None, {9: 2.0}]),
            min_tokens=rng.choice([0, 10]),
            stop_token_ids=tuple(rng.randrange(256) for _ in range(rng.choice([0, 10]))),
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        ref = rng.choice([None, *llama.refs.values()])
        activation = rng.randrange(len(prompt)) if ref else 0
        requests.append(
            Generate(
                number,
                "",
                llama.digest,
                prompt,
                params,
                cache_domain="t",
                adapter=ref,
                activation=activation,
            )
        )
    # As soon as it may end, this one does.
    greedy = SamplingParams(
        60, 0, temperature=0.0, min_tokens=7, logit_bias={9: 100.0}, stop_token_ids=(9,)
    )
    requests.append(Generate(24, "", llama.digest, [1, 2, 3], greedy, cache_domain="t"))
    in_turn, ahead = (played(llama, requests, runs_ahead) for runs_ahead in (False, True))
    assert ahead.answers == in_turn.answers and ahead.ended == in_turn.ended
    assert set(ahead.ended.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(ahead.answers[24]) == 8
    for number in ahead.answers:
        for one, other in zip(scores(ahead, number), scores(in_turn, number), strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def played(llama: Setup, requests: list[Generate], runs_ahead: bool) -> Driver:
    config = llama.config(memory=6 << 16, runs_ahead=runs_ahead)
    with Driver(config) as driver:
        driver.run(*requests)
    assert driver.worker.instances[llama.digest].engine.scheduler.num_preemptions > 0
    return driver


def scores(driver: Driver, number: int) -> list[TokenLogprobs]:
    outputs = driver.outputs[number]
    drawn = [entry for output in outputs for entry in output.logprobs or []]
    return drawn + [entry for output in outputs for entry in output.prompt_logprobs or []]
