"""Sequence of one request: its tokens, and how many of them are computed."""

from __future__ import annotations

import math
from enum import Enum

from adapters.pool.source import AdapterLease
from adapters.reference import AdapterRef
from memory.block_table import BlockTable
from memory.page_key import PAGE_TOKENS
from workers.scheduling.constraint import NO_CONSTRAINT, Constraint
from workers.scheduling.stage_times import StageTimes
from workers.scheduling.terms import TERMS
from workers.wire.protocol import FinishReason, Generate, OutputKind, Pooling, SequenceTimes


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens and state of one sequence. `tokens[:num_computed]` have their KV written; the next
    steps compute the rest.

        0 ........ num_cached ........ num_computed ..... num_prompt .... len(tokens)
        from the prefix cache | computed here       | still to compute  | generated

    Tokens that a step in flight computes count as computed. The token that this step draws counts
    in `length`, because the next step is built before the host has seen that token.

    A preempted sequence returns to `num_computed = 0` and keeps its generated tokens. When it
    restarts, `num_cached` changes only if more than `num_reached` positions are cached, because
    this sequence itself may have computed the first `num_reached`. A resumed sequence starts like a
    preempted one, with tokens that another worker generated.

    The engine appends tokens and sets the constraint, and the scheduler changes the rest. Both
    record some of the `times`.

    An activated LoRA acts on positions from `request.activation` on. The adapter's lease is held
    from the start, so that an admitted sequence never waits for its adapter in mid-prefill.
    """

    def __init__(
        self,
        connection: int,
        request: Generate,
        *,
        arrival_s: float,
        end_tokens: frozenset[int],
        block_table: BlockTable,
        layout: str,
    ) -> None:
        self.connection = connection
        self.request = request
        self.times = StageTimes(arrival_s)
        self.tokens = list(request.tokens)
        self.num_prompt = len(request.tokens) - request.num_resumed
        self.num_computed = 0
        self.num_queued = len(self.tokens)
        """Number of tokens when the sequence was last queued."""
        self.num_finished = 0
        """Number of these and later tokens that finished steps have computed since then."""
        self.num_inflight_steps = 0
        """Number of steps in flight that use the sequence's pages, slot and lease."""
        self.num_inflight_tokens = 0
        """Number of tokens that steps in flight will draw, which are not in `tokens` yet."""
        self.num_cached = 0
        self.num_reached = 0
        """Largest number of prompt positions that were computed or cached after a finished step."""
        self.status = SequenceStatus.WAITING
        self.block_table = block_table
        self.lease: AdapterLease | None = None
        self.slot: int | None = None
        """Slot of the token buffer while the sequence runs, else None."""
        self._hasher = request.page_hasher(layout)
        self._page_keys: list[bytes] = []
        self.awaited_key: bytes | None = None
        """First uncached page when the sequence last tried to start."""
        self.terms = TERMS[request.service_class]
        self.constraint: Constraint = NO_CONSTRAINT
        """Set before the sequence is queued, and closed at its end."""
        self.end_tokens = request.ends(end_tokens)

    @property
    def key(self) -> tuple[int, int]:
        """Pair of connection number and request id, unique in a worker."""
        return self.connection, self.request.id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.request.adapter

    @property
    def length(self) -> int:
        """Number of tokens after the steps in flight, if the sequence does not end with them."""
        return len(self.tokens) + self.num_inflight_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.length - self.num_computed

    @property
    def may_skip_cached(self) -> bool:
        """Whether positions found in the prefix cache need not be computed, because no output
        depends on their hidden states. The last position is always computed."""
        if self.request.kind is OutputKind.EMBED:
            return self.request.pooling is Pooling.LAST
        return self.request.params.prompt_logprobs is None

    @property
    def is_generating(self) -> bool:
        """Whether the next step may generate a token: the prompt is computed, `max_len` is not
        reached, and the constraint does not depend on a token that is still in flight."""
        return not self.is_prefilling and self.length < self.max_len and not self.awaits_token

    @property
    def awaits_token(self) -> bool:
        """Whether the next step leaves the sequence out, although it will go on, because its
        constraint depends on a token that is still in flight."""
        is_in_flight = self.num_inflight_tokens > 0 and self.length < self.max_len
        return is_in_flight and self.constraint.needs_host_token

    @property
    def is_activated(self) -> bool:
        """Whether the adapter, if any, acts on the next token."""
        return self.num_computed >= self.request.activation

    def num_next(self, budget: int) -> int:
        """Returns the number of tokens for the next step, at most `budget`. Stops at the
        activation, because a step uses the adapter for all of the sequence's tokens or for none."""
        end = self.length if self.is_activated else self.request.activation
        return min(end - self.num_computed, budget)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_begun(self) -> bool:
        """Whether this worker has generated a token of the sequence."""
        return self.num_generated > self.request.num_resumed

    @property
    def max_len(self) -> int:
        """Number of tokens that the sequence has if it runs to its `max_tokens`."""
        return self.num_prompt + self.request.params.max_tokens

    @property
    def is_pending(self) -> bool:
        """Whether no finished step has computed all tokens with which the sequence was queued."""
        return self.num_finished < self.num_queued

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens with which the sequence was queued are still to be scheduled. If the
        sequence draws no token, this is true until its last step has finished."""
        return self.is_pending and not self.num_inflight_tokens

    @property
    def is_waiting(self) -> bool:
        return self.status is SequenceStatus.WAITING

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def expires_s(self) -> float:
        """Deadline for the first token, in seconds of the worker's clock; infinity if none."""
        timeout_s = self.request.timeout_s
        return math.inf if timeout_s is None else self.times.arrival_s + timeout_s

    def page_keys(self, num_pages: int) -> list[bytes]:
        """Returns the keys of the first `num_pages` full pages of `tokens`, computed or not."""
        self._hasher.extend(self._page_keys, self.tokens, num_pages)
        return self._page_keys[:num_pages]

    def page_key(self, index: int) -> bytes | None:
        """Returns the key of full page `index` of `tokens`, or None if there is no such page."""
        if index >= len(self.tokens) // PAGE_TOKENS:
            return None
        self._hasher.extend(self._page_keys, self.tokens, index + 1)
        return self._page_keys[index]

    def prompt_key(self) -> bytes | None:
        """Returns one hash of the pages of the prompt that can be shared, or None if none can."""
        num_pages = (self.num_prompt - 1) // PAGE_TOKENS
        tokens = self.tokens[: num_pages * PAGE_TOKENS]
        return self._hasher.key(num_pages - 1, None, tokens) if num_pages else None

    def num_found(self) -> int:
        """Returns the number of tokens that need not be computed, because they are cached now."""
        num_pages = (len(self.tokens) - 1) // PAGE_TOKENS if self.may_skip_cached else 0
        return self.block_table.num_found(self.page_key, num_pages) * PAGE_TOKENS

    def traced(self, now: float) -> SequenceTimes | None:
        """Returns the times of the sequence's stages until `now` if its request is traced, else
        None."""
        return None if self.request.traceparent is None else self.times.to_wire(now)

    def end_within(self, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """Returns how many of the tokens the sequence accepts, and its finish reason if it ends."""
        num_left = self.request.params.max_tokens - self.num_generated
        for number, token in enumerate(tokens[:num_left], start=1):
            if token in self.end_tokens:
                return number, FinishReason.STOP
        if len(tokens) >= num_left:
            return num_left, FinishReason.LENGTH
        return len(tokens), None
