"""A model without tensors, for the engine under a fake clock.

Its KV cache holds, per page and slot, a digest of all tokens up to that position and of the adapter
that acts on each. A row checks that every slot it attends to holds the digest it should: a page
shared, freed, overwritten or computed with the wrong adapter is caught at once. The next token is a
pure function of the sequence's own adapter, activation and tokens, so `alone()` is the oracle of
any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from memory.page_key import PAGE_TOKENS
from workers.scheduling.schedule import PendingStep, Schedule, ScheduledSequence, StepResult
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


class Rows:
    """The token buffer: what a step draws is written there, and the next one reads it there."""

    def __init__(self, count: int) -> None:
        self.free_rows = list(range(count))
        self.tokens: dict[int, dict[int, int]] = {}

    def allocate(self, tokens: list[int]) -> int:
        row = self.free_rows.pop()
        self.tokens[row] = dict(enumerate(tokens))
        return row

    def free(self, row: int) -> None:
        self.free_rows.append(row)


@dataclass
class Late:
    """A step that is computed as late as it can be: when somebody waits for it."""

    result: Callable[[], StepResult]


@dataclass
class SimulatedRunner:
    """Runs a schedule on digests; `seconds_per_token` moves the clock. A step reads the sequences
    as they are when it is launched, and of the tokens only what the device has."""

    clock: FakeClock
    rows: Rows
    seconds_per_token: float = 0.001
    cache: dict[tuple[int, int], bytes] = field(default_factory=dict)
    num_steps: int = 0

    def launch(self, schedule: Schedule) -> PendingStep:
        self.num_steps += 1
        self.clock.now += self.seconds_per_token * schedule.num_tokens
        slots = [item.slot for item in schedule.items]
        boundaries = sum(a != b for a, b in pairwise(slots))
        assert boundaries == len(set(slots)) - 1, "rows of one adapter are not neighbours"
        assert -1 not in slots or slots[slots.index(-1) :] == [-1] * slots.count(-1)
        launched = [self._launch(item) for item in schedule.items]
        scored = {
            item.sequence.key: _scores(item)
            for item in schedule.items
            if item.sequence.params.prompt_logprobs is not None
        }

        def compute() -> StepResult:
            drawn = [token for item in launched if (token := item()) is not None]
            return StepResult(drawn, [None] * len(drawn), scored)

        return Late(compute)

    def _launch(self, item: ScheduledSequence) -> Callable[[], int | None]:
        sequence, start, end, row = item.sequence, item.start, item.end, item.sequence.row
        assert row is not None
        assert (sequence.lease is None) == (sequence.adapter is None)
        adapters = acting(sequence.request, end)
        in_chunk = set(adapters[start:])
        assert len(in_chunk) == 1, "a chunk crosses the activation"
        assert (item.slot < 0) == (in_chunk == {"base"})
        pages = sequence.block_table.pages.copy()

        def compute() -> int | None:
            """The token, if one is drawn."""
            assert sequence.row == row and sequence.block_table.pages[: len(pages)] == pages
            assert (sequence.lease is None) == (sequence.adapter is None), "its slot is given up"
            digests = prefix_digests(adapters, [self.rows.tokens[row][p] for p in range(end)])
            for position in range(end):
                place = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                if position >= start:
                    self.cache[place] = digests[position]
                assert self.cache.get(place) == digests[position], (
                    f"position {position} was overwritten"
                )
            if not item.is_sampled:
                return None
            token = self.rows.tokens[row][end] = next_token(digests[-1])
            return token

        return compute


def _scores(item: ScheduledSequence) -> list[TokenLogprobs]:
    first = item.start + 1
    last = min(first + item.num_tokens, item.sequence.num_prompt)
    return [
        TokenLogprobs(token, -float(first + index), [])
        for index, token in enumerate(item.sequence.tokens[first:last])
    ]
