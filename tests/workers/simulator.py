"""A model without tensors, for the engine under a fake clock.

Its KV cache holds, per page and slot, a digest of all tokens up to that position and of the adapter
that acts on each. A row checks that every slot it attends to holds the digest it should: a page
shared, freed, overwritten or computed with the wrong adapter is caught at once. The next token is a
pure function of the sequence's own adapter, activation and tokens, so `alone()` is the oracle of
any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from memory.page_key import PAGE_TOKENS
from ops.commands import Command, WriteTokens
from workers.execution.step_input import (
    PendingStep,
    ScoreInput,
    SequenceResult,
    StepInput,
    StepOutput,
)
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import Generate, TokenLogprobs

VOCAB = 97
END = 96


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prefix_digests(acting: list[str], tokens: list[int]) -> list[bytes]:
    """digest[i] stands for the KV of position i, computed with the adapter acting[i]."""
    state = blake2b(digest_size=8)
    digests: list[bytes] = []
    for adapter, token in zip(acting, tokens, strict=True):
        state.update(f"{adapter} {token};".encode())
        digests.append(state.copy().digest())
    return digests


def next_token(digest: bytes) -> int:
    return int.from_bytes(digest, "little") % VOCAB


def acting(request: Generate, num_tokens: int) -> list[str]:
    """The adapter's digest or "base" for each position."""
    if request.adapter is None:
        return ["base"] * num_tokens
    num_base = min(request.activation, num_tokens)
    return ["base"] * num_base + [request.adapter.digest] * (num_tokens - num_base)


def alone(request: Generate) -> list[int]:
    """What the sequence must generate, whatever else runs."""
    tokens = list(request.tokens)
    for _ in range(request.params.max_tokens - request.num_resumed):
        tokens.append(next_token(prefix_digests(acting(request, len(tokens)), tokens)[-1]))
        if tokens[-1] == END:
            break
    return tokens[len(request.tokens) :]


class Slots:
    """The token buffer: what a step draws is written there, and the next one reads it there."""

    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = {}
        self.scheduler: Scheduler | None = None
        """Set by a simulation: to look at what the device is not told."""

    def user(self, slot: int) -> Sequence | None:
        """The live sequence in the slot, if any."""
        assert self.scheduler is not None
        users = [*self.scheduler.running, *self.scheduler.leaving]
        return next((sequence for sequence in users if sequence.slot == slot), None)

    def sequence(self, slot: int) -> Sequence:
        user = self.user(slot)
        assert user is not None
        return user

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if not isinstance(command, WriteTokens):
                continue
            if not command.position:
                self.tokens[command.slot] = {}
            self.tokens[command.slot].update(enumerate(command.tokens.tolist(), command.position))


@dataclass
class Late:
    """A step that is computed as late as it can be: when somebody waits for it."""

    result: Callable[[], StepOutput]


@dataclass
class SimulatedRunner:
    """Computes steps on digests; `seconds_per_token` moves the clock. It knows the requests of the
    sequences, to be their oracle; of their tokens it reads only what the device has."""

    clock: FakeClock
    slots: Slots
    seconds_per_token: float = 0.001
    cache: dict[tuple[int, int], bytes] = field(default_factory=dict)
    num_steps: int = 0

    def launch(self, step: StepInput) -> PendingStep:
        self.num_steps += 1
        self.slots.apply(step.commands)
        self.clock.now += self.seconds_per_token * int(step.counts.sum())
        slots = step.adapter_slots.tolist()
        boundaries = sum(a != b for a, b in pairwise(slots))
        assert boundaries == len(set(slots)) - 1, "tokens of one adapter are not neighbours"
        assert -1 not in slots or slots[slots.index(-1) :] == [-1] * slots.count(-1)
        launched = [self._launch(step, index) for index in range(len(step.counts))]
        sampled = {sample.sequence for sample in step.samples}

        def compute() -> StepOutput:
            results = [SequenceResult() for _ in launched]
            for index, item in enumerate(launched):
                digest = item()
                if index in sampled:
                    results[index].tokens = self.draw(step, index, digest)
            for score in step.scores:
                results[score.sequence].prompt_logprobs = _scores(step, score)
            return StepOutput(results)

        return Late(compute)

    def draw(self, step: StepInput, index: int, digest: bytes) -> list[int]:
        """The next token of a sequence whose last position has this digest."""
        token = next_token(digest)
        slot, end = int(step.sequence_slots[index]), int(step.starts[index] + step.counts[index])
        self.slots.tokens[slot][end] = token
        return [token]

    def _launch(self, step: StepInput, index: int) -> Callable[[], bytes]:
        start = int(step.starts[index])
        end = start + int(step.counts[index])
        slot = int(step.sequence_slots[index])
        sequence = self.slots.sequence(slot)
        assert (sequence.lease is None) == (sequence.adapter is None)
        adapters = acting(sequence.request, end)
        in_chunk = set(adapters[start:])
        assert len(in_chunk) == 1, "a chunk crosses the activation"
        assert (int(step.adapter_slots[index]) < 0) == (in_chunk == {"base"})
        num_pages = -(-end // PAGE_TOKENS)
        held = sequence.block_table.pages[:num_pages]
        pages: list[int] = step.block_tables[index, :num_pages].tolist()

        def compute() -> bytes:
            """The digest of the last position."""
            assert sequence.slot == slot and sequence.block_table.pages[:num_pages] == held
            assert (sequence.lease is None) == (sequence.adapter is None), "its slot is given up"
            digests = prefix_digests(adapters, [self.slots.tokens[slot][p] for p in range(end)])
            for position in range(end):
                place = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                if position >= start:
                    self.cache[place] = digests[position]
                assert self.cache.get(place) == digests[position], (
                    f"position {position} was overwritten"
                )
            return digests[-1]

        return compute


def _scores(step: StepInput, score: ScoreInput) -> list[TokenLogprobs]:
    first = int(step.starts[score.sequence]) + 1
    return [
        TokenLogprobs(token, -float(first + index), []) for index, token in enumerate(score.targets)
    ]
