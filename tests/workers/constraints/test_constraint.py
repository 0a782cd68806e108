"""What every constraint does for engine and sampler, whatever it holds a sequence to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Semaphore

import numpy as np
import pytest

from tests.doubles import make_tokenizer
from tests.waiting import until
from tests.workers.simulation import Simulation, generate
from workers.constraints.grammars import Grammars
from workers.constraints.request_constraints import RequestConstraints
from workers.constraints.sequence_grammar import NUM_COMPILING, GrammarThreads
from workers.scheduling.constraint import Constraint, NoConstraint, effective_bans
from workers.wire import grammars
from workers.wire.protocol import ErrorCode, Generate, SamplingParams, ThoughtBound, TokenRules

VOCAB, END, NUM_TOKENS = 260, 257, 12
REGEX = grammars.of_regex("x(ab|ac){2}[0-9]*")
BANNED = TokenRules(banned=((5,), (6, 7), (7, 7, 8)))
THOUGHT = TokenRules(thought=ThoughtBound(3, begin=258, end=259, is_begun=True))

FORMS: dict[str, tuple[str, TokenRules | None]] = {
    "none": ("", None),
    "allowed": ("", TokenRules(allowed=(1, 40, 259))),
    "banned": ("", BANNED),
    "thought": ("", THOUGHT),
    "grammar": (REGEX, None),
    "grammar-and-rules": (REGEX, BANNED),
}
Open = Callable[[list[int]], Constraint]


@pytest.fixture
def threads() -> Iterator[GrammarThreads]:
    threads = GrammarThreads()
    yield threads
    threads.close()


@pytest.fixture
def compiler(tmp_path: Path, threads: GrammarThreads) -> Iterator[Grammars]:
    make_tokenizer(tmp_path)
    compiler = Grammars(tmp_path / "tokenizer.json", VOCAB, frozenset([END]), threads)
    yield compiler
    compiler.close()


def request_of(grammar: str, rules: TokenRules | None) -> Generate:
    params = SamplingParams(NUM_TOKENS, seed=0, rules=rules)
    return Generate(0, "0", "model", [1, 2], params, cache_domain="t", grammar=grammar)


@pytest.fixture(params=FORMS)
def opening(request: pytest.FixtureRequest, compiler: Grammars) -> Open:
    """Opens a constraint of one form, and waits until it is ready."""
    asked = request_of(*FORMS[request.param])
    source = RequestConstraints(VOCAB, compiler)
    assert source.refusal(asked) is None
    return lambda generated: ready(source.open(asked, generated))


def ready(constraint: Constraint) -> Constraint:
    until(lambda: constraint.is_ready)
    return constraint


def allowed_by(constraint: Constraint) -> set[int]:
    """As the sampler reads it."""
    mask = constraint.mask
    left = set(range(VOCAB))
    if mask is not None:
        assert (mask.dtype, mask.shape) == (np.int32, (-(-VOCAB // 32),))
        left = {token for token in left if mask[token // 32] >> token % 32 & 1}
    return left - effective_bans(constraint.banned, mask)


def follow(constraint: Constraint, token: int) -> list[int]:
    """Returns the token with those that it forces."""
    if not constraint.needs_host_token:
        return [token]
    constraint.advance([token])
    new = [token, *constraint.forced()]
    ready(constraint)
    return new


def test_an_allowed_token_can_be_followed_wherever_the_sequence_is_resumed(opening: Open) -> None:
    rng, constraint = random.Random(1), opening([])
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS and END not in tokens:
        assert constraint.failure is None
        allowed = allowed_by(constraint)
        assert allowed and allowed_by(opening(tokens)) == allowed
        tokens += follow(constraint, rng.choice(sorted(allowed)))
    constraint.close()


def test_a_token_that_is_forced_is_the_only_one_allowed(opening: Open) -> None:
    rng, constraint = random.Random(2), opening([])
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS and END not in tokens:
        first, *forced = follow(constraint, rng.choice(sorted(allowed_by(constraint))))
        tokens.append(first)
        for token in forced:
            assert allowed_by(opening(tokens)) == {token}
            tokens.append(token)


def test_what_needs_no_token_of_the_host_stays_as_it_is(opening: Open) -> None:
    constraint = opening([])
    before = allowed_by(constraint)
    if not constraint.needs_host_token:
        assert allowed_by(opening(sorted(before)[:1] * 5)) == before
    constraint.close()
    constraint.close()


def test_grammars_of_sequences_that_have_ended_are_not_compiled(
    compiler: Grammars, threads: GrammarThreads
) -> None:
    """Nor kept, however many a client sends and aborts."""
    is_free, held = Event(), Semaphore(0)

    def hold() -> None:
        held.release()
        is_free.wait()

    for _ in range(NUM_COMPILING):
        threads.compiling.submit(hold)
    try:
        assert all(held.acquire(timeout=60) for _ in range(NUM_COMPILING))
        opened = [compiler.open(REGEX, f"t{n % 3}", "request", []) for n in range(300)]
        kept = opened.pop()
        for each in opened:
            each.close()
        assert compiler.num_waiting == 1
        assert threads.compiling._work_queue.qsize() <= NUM_COMPILING  # pyright: ignore
    finally:
        is_free.set()
    ready(kept)
    assert not any(each.is_ready for each in opened) and compiler.num_waiting == 0


def test_the_engine_closes_the_constraint_of_each_sequence_once() -> None:
    closed: list[int] = []

    class Closing(NoConstraint):
        def __init__(self, number: int) -> None:
            self.number = number

        def close(self) -> None:
            closed.append(self.number)

    class Source:
        def refusal(self, request: Generate) -> None:
            return None

        def open(self, request: Generate, generated: object) -> Constraint:
            return Closing(request.id)

    simulation = Simulation(max_num_seqs=1, constraints=Source())
    simulation.submit(generate(0, [1, 2, 3]))
    simulation.step()
    simulation.submit(generate(1, [1, 2, 3]))
    simulation.submit(generate(2, [1, 2, 3], timeout_s=0.001))
    simulation.engine.abort(0, 1)
    assert closed == [1]
    simulation.run()
    assert simulation.finished[2] is ErrorCode.EXPIRED and sorted(closed) == [0, 1, 2]
