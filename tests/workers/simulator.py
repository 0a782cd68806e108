"""A model without tensors, for the engine under a fake clock.

Its KV cache holds, per page and slot, a digest of (adapter, all tokens up to that position). A row
checks that every slot it attends to holds the digest it should: a page shared, freed or overwritten
wrongly is caught at once. The next token is a pure function of the sequence's own adapter and
tokens, so `alone()` is the oracle of any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from memory.page_key import PAGE_TOKENS
from workers.step import Schedule, ScheduledSequence, StepResult

VOCAB = 97
END = 96


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prefix_digests(adapter: str, tokens: list[int]) -> list[bytes]:
    """digest[i] stands for the KV of position i."""
    state = blake2b(adapter.encode(), digest_size=8)
    digests: list[bytes] = []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        digests.append(state.copy().digest())
    return digests


def next_token(digest: bytes) -> int:
    return int.from_bytes(digest, "little") % VOCAB


def alone(adapter: str, prompt: list[int], max_tokens: int) -> list[int]:
    """What the sequence must generate, whatever else runs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(prefix_digests(adapter, tokens)[-1]))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


@dataclass
class SimulatedRunner:
    """Runs a schedule on digests; `seconds_per_token` moves the clock."""

    clock: FakeClock
    seconds_per_token: float = 0.001
    cache: dict[tuple[int, int], bytes] = field(default_factory=dict)
    num_steps: int = 0

    def run(self, schedule: Schedule) -> StepResult:
        self.num_steps += 1
        self.clock.now += self.seconds_per_token * schedule.num_tokens
        slots = [item.slot for item in schedule.items]
        boundaries = sum(a != b for a, b in pairwise(slots))
        assert boundaries == len(set(slots)) - 1, "rows of one adapter are not neighbours"
        assert -1 not in slots or slots[slots.index(-1) :] == [-1] * slots.count(-1)
        result = StepResult()
        drawn = {id(item.sequence): self._compute(item) for item in schedule.items}
        for item in schedule.sampled:
            result.tokens.append(drawn[id(item.sequence)])
            result.logprobs.append(None)
        return result

    def _compute(self, item: ScheduledSequence) -> int:
        sequence = item.sequence
        assert sequence.row is not None
        adapter = sequence.adapter.digest if sequence.adapter else "base"
        assert (sequence.lease is None) == (sequence.adapter is None)
        end = sequence.num_computed + item.num_tokens
        digests = prefix_digests(adapter, sequence.tokens[:end])
        pages = sequence.block_table.pages
        for position in range(end):
            place = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            if position >= sequence.num_computed:
                self.cache[place] = digests[position]
            assert self.cache.get(place) == digests[position], (
                f"position {position} was overwritten"
            )
        return next_token(digests[-1])
