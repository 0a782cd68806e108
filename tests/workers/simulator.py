"""A model without tensors, for the engine under a fake clock.

Its KV cache holds, per page and slot, a digest of all tokens up to that position and of the adapter
that acts on each. A row checks that every slot it attends to holds the digest it should: a page
shared, freed, overwritten or computed with the wrong adapter is caught at once. The next token is a
pure function of the sequence's own adapter, activation and tokens, so `alone()` is the oracle of
any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from memory.page_key import PAGE_TOKENS
from workers.protocol import Generate, TokenLogprobs
from workers.step import Schedule, ScheduledSequence, StepResult

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
        for item in schedule.items:
            sequence = item.sequence
            if sequence.params.prompt_logprobs is not None:
                first = sequence.num_computed + 1
                last = min(first + item.num_tokens, sequence.num_prompt)
                result.prompt_logprobs[sequence.key] = [
                    TokenLogprobs(token, -float(first + index), [])
                    for index, token in enumerate(sequence.tokens[first:last])
                ]
        return result

    def _compute(self, item: ScheduledSequence) -> int:
        sequence = item.sequence
        assert sequence.row is not None
        assert (sequence.lease is None) == (sequence.adapter is None)
        end = sequence.num_computed + item.num_tokens
        adapters = acting(sequence.request, end)
        in_chunk = set(adapters[sequence.num_computed :])
        assert len(in_chunk) == 1, "a chunk crosses the activation"
        assert (item.slot < 0) == (in_chunk == {"base"})
        digests = prefix_digests(adapters, sequence.tokens[:end])
        pages = sequence.block_table.pages
        for position in range(end):
            place = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            if position >= sequence.num_computed:
                self.cache[place] = digests[position]
            assert self.cache.get(place) == digests[position], (
                f"position {position} was overwritten"
            )
        return next_token(digests[-1])
