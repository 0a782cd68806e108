"""What a scheduler's queue may hold, who is refused when it is full, and when he may come again.

The queue is bounded in requests, in prompt tokens and in the time that a request would wait in it.
Each tenant may fill its share. Who is full beyond it makes room for a newcomer who is not: its
newest request is pushed out. A sequence whose answer has begun is never refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.scheduling.fairness import TERMS, Account, FairQueue
from workers.scheduling.sequence import Sequence
from workers.scheduling.step_cost import StepTime
from workers.wire.protocol import MAX_RETRY_S, ServiceClass

MEMORY_S = 10.0
"""Of the drain rate: what is so long ago counts 1/e."""
MIN_MEASURED_S = 0.5
"""Of a queue that was never empty, before its drain rate is believed."""

ASSUMED_OUTPUT = 32
"""Tokens that a waiting request is taken to generate before the next one's first token. Their rows
share steps with prompts, so few of them matter."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """max_wait_s: of an interactive request, estimated when it comes; the other classes wait as
    much longer as their first token may come later."""

    max_requests: int = 1024
    max_tokens: int = 1 << 20
    max_wait_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Refusal:
    sequence: Sequence
    message: str
    retry_after_s: float
    pace_s: float = 0.0
    """How long one place takes to come free for the tenant; 0: not known, or no place would do."""


class DrainRate:
    """How fast a queue goes down, while there is one: requests and prompt tokens a second."""

    def __init__(self) -> None:
        self._seconds = self._requests = self._tokens = 0.0
        self._backlogged_at_s: float | None = None

    def note(self, now: float, num_requests: int, num_tokens: int, *, is_backlogged: bool) -> None:
        """So many have left the queue since the last call; does it still hold some?"""
        if self._backlogged_at_s is not None:
            seconds = min(now - self._backlogged_at_s, MEMORY_S)
            memory = math.exp(-seconds / MEMORY_S)
            self._seconds = memory * self._seconds + seconds
            self._requests = memory * self._requests + num_requests
            self._tokens = memory * self._tokens + num_tokens
        self._backlogged_at_s = now if is_backlogged else None

    @property
    def is_backlogged(self) -> bool:
        return self._backlogged_at_s is not None

    def seconds_for(self, num_requests: float, num_tokens: float) -> float:
        """For so many to leave; 0 before it was measured. As if the next one left right now: while
        those that run answer for long none may leave, yet the queue does not stand for ever."""
        if self._seconds < MIN_MEASURED_S:
            return 0.0
        num_left = self._requests
        if num_tokens:
            num_left = min(num_left, self._tokens * num_requests / num_tokens)
        return self._seconds * num_requests / (num_left + 1)


class Overload:
    """Of one queue."""

    def __init__(
        self, queue: FairQueue, bounds: QueueBounds, step_time: StepTime, rows_a_step: int
    ) -> None:
        """step_time: predicts the work ahead, from the first burst on. rows_a_step: at most."""
        self._queue = queue
        self._bounds = bounds
        self._step_time = step_time
        self._rows_a_step = rows_a_step
        self.rate = DrainRate()

    def refuse_for(
        self, newcomer: Sequence, now: float, num_free_slots: int, running: Iterable[Sequence]
    ) -> list[Refusal]:
        """Sequences that are refused so that the newcomer may wait: none, others, or the newcomer
        alone."""
        request = newcomer.request
        if request.num_resumed:
            return []
        account = self._queue.account(request.service_class, request.tenant, request.weight)
        bounds = self._bounds
        wait_s = max(
            self._wait_s(account, newcomer, num_free_slots), self._work_ahead_s(account, running)
        )
        max_wait_s = bounds.max_wait_s * account.line.terms.ttft_s / _INTERACTIVE.ttft_s
        if wait_s > min(max_wait_s, newcomer.expires_s - newcomer.arrival_s):
            message = f"a first token would take about {wait_s:.0f} s"
            return [self._refusal(newcomer, account, message, now, is_full=wait_s > max_wait_s)]
        if self._queue.num_waiting == 0:
            return []  # or else a prompt longer than the queue would never be in it
        return self._push_out(newcomer, account, now)

    def _push_out(self, newcomer: Sequence, account: Account, now: float) -> list[Refusal]:
        """As many as stand in the newcomer's way, if all are of tenants fuller than its own."""
        num_requests, num_tokens = 1, len(newcomer.tokens)
        own = self._fullness(account, num_requests, num_tokens)
        victims: list[Sequence] = []
        while not self._has_room(num_requests, num_tokens):
            victim = self._fullest(victims, own)
            if victim is None:
                return [self._refusal(newcomer, account, "the queue is full", now)]
            victims.append(victim)
            num_requests, num_tokens = num_requests - 1, num_tokens - len(victim.tokens)
        message = "the queue is full, and others have less than their share of it"
        return [self._refusal(victim, victim.account, message, now) for victim in victims]

    def _has_room(self, num_requests: int, num_tokens: int) -> bool:
        """For so many more."""
        queue, bounds = self._queue, self._bounds
        return (
            queue.num_waiting + num_requests <= bounds.max_requests
            and queue.num_waiting_tokens + num_tokens <= bounds.max_tokens
        )

    def _fullest(self, gone: list[Sequence], above: float) -> Sequence | None:
        """The newest waiting request of the tenant furthest above its share of the queue, `gone`
        not counted, if it is further above than `above`."""
        best: Sequence | None = None
        for account in self._accounts():
            own = [sequence for sequence in gone if sequence.account is account]
            num_tokens = sum(len(sequence.tokens) for sequence in own)
            fullness = self._fullness(account, -len(own), -num_tokens)
            if fullness > above and (newest := _newest(account, own)) is not None:
                best, above = newest, fullness
        return best

    def _fullness(self, account: Account, num_requests: int, num_tokens: int) -> float:
        """Of the tenant's share of the queue, with so many more; 1 is full."""
        requests = (account.num_waiting + num_requests) / self._bounds.max_requests
        tokens = (account.num_waiting_tokens + num_tokens) / self._bounds.max_tokens
        return max(requests, tokens) / self._share(account)

    def _wait_s(self, account: Account, newcomer: Sequence, num_free_slots: int) -> float:
        """Of the newcomer behind its tenant's other requests, at the tenant's share of the rate.
        Rows that nobody was waiting for are taken at once."""
        share = self._share(account)
        num_requests = (account.num_waiting + 1) / share
        num_tokens = (account.num_waiting_tokens + len(newcomer.tokens)) / share
        num_behind = num_requests if self.rate.is_backlogged else num_requests - num_free_slots
        if self._queue.num_waiting == 0 or num_behind <= 0:
            return 0.0
        return self.rate.seconds_for(num_behind, num_tokens * num_behind / num_requests)

    def _work_ahead_s(self, account: Account, running: Iterable[Sequence]) -> float:
        """Seconds that the tenant's accepted requests still take at its share of the device, by
        predicted step times: what is not computed of their prompts, and some output of each. 0
        before a step was measured."""
        begun = [s for s in running if s.account is account and s.is_prefilling]
        num_requests = account.num_waiting + len(begun)
        if not num_requests:
            return 0.0
        num_tokens = account.num_waiting_tokens + sum(s.num_uncomputed for s in begun)
        context = num_tokens / num_requests / 2
        num_rows = num_tokens + ASSUMED_OUTPUT * num_requests
        seconds = self._step_time.prompt_seconds(num_rows, context, self._rows_a_step)
        return seconds / self._share(account)

    def _pace_s(self, sequence: Sequence, account: Account) -> float:
        """Seconds for one place to come free for the tenant: as measured, else as predicted."""
        measured_s = self.rate.seconds_for(1 / self._share(account), 0.0)
        if measured_s:
            return measured_s
        num_tokens = len(sequence.tokens)
        rows, context = num_tokens + ASSUMED_OUTPUT, num_tokens / 2
        predicted_s = self._step_time.prompt_seconds(rows, context, self._rows_a_step)
        return predicted_s / self._share(account)

    def _refusal(
        self, sequence: Sequence, account: Account, message: str, now: float, is_full: bool = True
    ) -> Refusal:
        """Those who are refused are told to come one after the other, as fast as the queue goes
        down for their tenant. `is_full`: another of the tenant would have been refused too."""
        pace_s = self._pace_s(sequence, account)
        room_s = max(account.next_room_s, now) + pace_s
        account.next_room_s = min(room_s, now + MAX_RETRY_S)
        retry_s = max(account.next_room_s - now, 1.0)
        return Refusal(sequence, message, retry_s, pace_s if is_full else 0.0)

    def _share(self, account: Account) -> float:
        """Of the tenant among all that wait, as if it waited too."""
        lines = [line for line in self._queue.lines.values() if line.active or line is account.line]
        line_share = account.line.terms.share / sum(line.terms.share for line in lines)
        others = account.line.active.values()
        weight = sum(other.weight for other in others if other is not account) + account.weight
        return line_share * account.weight / weight

    def _accounts(self) -> Iterator[Account]:
        for line in self._queue.lines.values():
            yield from line.active.values()


_INTERACTIVE = TERMS[ServiceClass.INTERACTIVE]


def _newest(account: Account, gone: list[Sequence]) -> Sequence | None:
    """That may be refused."""
    candidates = (
        sequence
        for sequence in account.pending[account.num_started :]
        if sequence.num_generated == 0 and sequence not in gone
    )
    return max(candidates, key=lambda sequence: sequence.arrival_s, default=None)
