"""A step may give a sequence zero, one or several tokens. What is sent, charged, cached and held
counts tokens, whatever the number of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from tests.workers.execution.test_ahead import answer, asked
from tests.workers.simulation import Simulation, StubPool, TokenCount, generate, prompt_of
from tests.workers.simulator import Late, SimulatedRunner, acting, alone, next_token, prefix_digests
from tests.workers.waiting import waiting_of
from workers.execution.step_input import PendingStep, StepInput, StepOutput
from workers.process.outbox import frames
from workers.scheduling.constraint import NoConstraint
from workers.wire.frames import StepFrame
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    OutputKind,
    SequenceOutput,
    TokenLogprobs,
)


@dataclass
class ScriptedDevice(SimulatedRunner):
    """Gives each sequence as many tokens a step as the script says. Their KV is not computed but
    for the first, so that the next step computes it."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    counts: tuple[int, ...] = (1,)
    given: list[int] = field(default_factory=list[int])

    def launch(self, step: StepInput) -> PendingStep:
        launched = super().launch(step)

        def compute() -> StepOutput:
            output = launched.result()
            for sample in step.samples:
                if sample.params.logprobs is not None:
                    result = output.sequences[sample.sequence]
                    result.logprobs = [TokenLogprobs(token, -1, []) for token in result.tokens]
            return output

        return Late(compute)

    def draw(self, step: StepInput, index: int, digest: bytes) -> list[int]:
        slot, end = int(step.sequence_slots[index]), int(step.starts[index] + step.counts[index])
        known, request = self.slots.tokens[slot], self.slots.sequence(slot).request
        count = self.chance.choice(self.counts)
        self.given.append(count)
        drawn: list[int] = []
        for position in range(end, end + count):
            tokens = [known[p] for p in range(position)]
            known[position] = next_token(prefix_digests(acting(request, position), tokens)[-1])
            drawn.append(known[position])
        return drawn


class HostTokens(NoConstraint):
    """Constraint of a sequence whose last token must be known, and that may get several."""

    needs_host_token = True


def played(
    counts: tuple[int, ...], requests: list[Generate], *, runs_ahead: bool, num_pages: int = 400
) -> Simulation:
    simulation = Simulation(
        num_pages=num_pages,
        pool=StubPool(num_slots=2),
        runner=ScriptedDevice,
        runs_ahead=runs_ahead,
        observe=TokenCount,
    )
    assert isinstance(simulation.runner, ScriptedDevice)
    simulation.runner.counts = counts
    for request in requests:
        simulation.submit(request)
    for sequence in waiting_of(simulation.scheduler):
        if counts != (1,):
            sequence.constraint = HostTokens()
    simulation.run()
    simulation.assert_at_rest()
    return simulation


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("counts", [(0, 1), (3,), (0, 1, 2, 5)])
def test_steps_of_any_number_of_tokens_are_as_steps_of_one(
    counts: tuple[int, ...], runs_ahead: bool
) -> None:
    """Tokens, ends in the middle of several, charges and counts."""
    rng = random.Random(3)
    shared = prompt_of(rng, 40)
    requests = [asked(rng, number, shared, [None, "a", "b"]) for number in range(20)]
    one = played((1,), requests, runs_ahead=False)
    other = played(counts, requests, runs_ahead=runs_ahead)
    for request in requests:
        tokens, reason = answer(request)
        assert other.outputs[request.id] == one.outputs[request.id] == tokens
        assert other.finished[request.id] is one.finished[request.id] is reason
    assert isinstance(other.runner, ScriptedDevice)
    assert set(other.runner.given) == set(counts)
    assert other.num_counted == sum(map(len, one.outputs.values()))


@pytest.mark.parametrize("counts", [(0, 1), (4,), (0, 1, 2, 5)])
def test_each_token_is_charged_once(counts: tuple[int, ...]) -> None:
    rng = random.Random(5)
    request = generate(0, prompt_of(rng, 30), 50)

    def charged(counts: tuple[int, ...]) -> float:
        simulation = Simulation(num_pages=400, runner=ScriptedDevice)
        assert isinstance(simulation.runner, ScriptedDevice)
        simulation.runner.counts = counts
        simulation.submit(request)
        sequence = waiting_of(simulation.scheduler)[0]
        sequence.constraint = HostTokens()
        account = simulation.scheduler.policy.account(sequence)
        simulation.run()
        assert simulation.outputs[0] == alone(request)
        return account.charge[1]

    assert charged(counts) == charged((1,))


def test_pages_are_cached_and_preempted_sequences_go_on() -> None:
    """Under too little memory; the device checks each position that it reads."""
    rng = random.Random(9)
    shared = prompt_of(rng, 40)
    requests = [
        generate(number, shared[: 20 + number] + prompt_of(rng, 10), 80, rng.choice([None, "a"]))
        for number in range(12)
    ]
    simulation = played((0, 1, 3), requests, runs_ahead=True, num_pages=16)
    assert simulation.scheduler.num_preemptions and simulation.scheduler.num_hit_tokens
    for request in requests:
        assert simulation.outputs[request.id] == alone(request)


def test_frames_carry_the_tokens_of_a_step() -> None:
    """One output a frame for each sequence that has enough tokens to send, with a log-probability
    for each token; the end of a sequence cuts what the device gave beyond it."""
    interval, num_tokens = 5, 25
    simulation = Simulation(num_pages=400, runner=ScriptedDevice, runs_ahead=True)
    assert isinstance(simulation.runner, ScriptedDevice)
    simulation.runner.counts = (0, 3)
    scored = msgspec.structs.replace(generate(0, [1, 2, 3]), kind=OutputKind.SCORE)
    score = msgspec.structs.replace(scored.params, max_tokens=0, prompt_logprobs=0)
    simulation.submit(msgspec.structs.replace(scored, params=score))
    for number, stream_interval in ((1, 1), (2, interval)):
        request = generate(number, [1, 2, 3], num_tokens, stream_interval=stream_interval)
        params = msgspec.structs.replace(request.params, logprobs=0, ignore_eos=True)
        simulation.submit(msgspec.structs.replace(request, params=params))
    for sequence in waiting_of(simulation.scheduler):
        sequence.constraint = HostTokens()
    sent: dict[int, list[SequenceOutput]] = {0: [], 1: [], 2: []}
    while simulation.engine.has_work:
        for connection, frame in frames(simulation.engine.step(), lambda _: None):
            assert connection == 0
            assert isinstance(frame, StepFrame)
            for output in frame.sequences:
                sent[output.id].append(output)
    (scores,) = sent[0]
    assert scores.tokens == [] and scores.finish_reason is FinishReason.LENGTH
    assert scores.prompt_logprobs is not None and len(scores.prompt_logprobs) == 2
    for number in (1, 2):
        tokens = [token for output in sent[number] for token in output.tokens]
        logprobs = [entry.token for output in sent[number] for entry in output.logprobs or []]
        assert logprobs == tokens and len(tokens) == num_tokens
        assert not any(output.finish_reason for output in sent[number][:-1])
        assert sent[number][-1].finish_reason is FinishReason.LENGTH
    assert [len(output.tokens) for output in sent[1]] == [3] * 8 + [1]
    assert [len(output.tokens) for output in sent[2]] == [3, 6, 6, 6, 4]


@pytest.mark.parametrize("needs_host_token", [False, True])
def test_a_sequence_that_needs_its_token_is_in_no_step_ahead(needs_host_token: bool) -> None:
    in_flight: list[int] = []

    class Watching(ScriptedDevice):
        def launch(self, step: StepInput):
            in_flight.append(self.slots.sequence(int(step.sequence_slots[0])).num_inflight_steps)
            return super().launch(step)

    simulation = Simulation(runner=Watching, runs_ahead=True)
    request = generate(0, [1, 2, 3], 8)
    simulation.submit(request)
    if needs_host_token:
        waiting_of(simulation.scheduler)[0].constraint = HostTokens()
    simulation.run()
    assert simulation.outputs[0] == alone(request)
    assert max(in_flight) == (1 if needs_host_token else 2)


@pytest.mark.parametrize("count", [0, 3])
def test_other_than_one_token_beside_a_step_ahead_fails_the_sequence(count: int) -> None:
    simulation = Simulation(runner=ScriptedDevice, runs_ahead=True)
    assert isinstance(simulation.runner, ScriptedDevice)
    simulation.runner.counts = (count,)
    simulation.slots.tokens[0] = {}
    simulation.submit(generate(0, [1, 2, 3], 30))
    simulation.step()
    simulation.step()
    assert simulation.finished[0] is ErrorCode.INTERNAL
