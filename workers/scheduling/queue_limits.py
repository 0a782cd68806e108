"""Bounds of a scheduler's queue: which request is refused when it is full, and when it may return.

The queue is bounded in requests, in prompt tokens and in the time that a request would wait in it.
Each tenant may fill its share. When the queue is full, a tenant beyond its share makes room for a
newcomer of a tenant within its share: its newest request is refused. A sequence whose answer has
begun is never refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.scheduling.fair_queue import FairQueue, TenantQueue
from workers.scheduling.sequence import Sequence
from workers.scheduling.step_cost import StepTime
from workers.scheduling.tenant_queue import TERMS
from workers.wire.protocol import MAX_RETRY_S, ServiceClass

MEMORY_S = 10.0
"""Decay time constant of the drain rate, in seconds."""
MIN_MEASURED_S = 0.5
"""Seconds of a backlog to measure before the drain rate is used."""

ASSUMED_OUTPUT = 32
"""Tokens that a waiting request is assumed to generate before the next one's first token. They
share steps with prompts, so few of them matter."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """max_wait_s: estimated wait of an interactive request when it arrives; the limit of other
    classes is longer in proportion to their time to first token."""

    max_requests: int = 1024
    max_tokens: int = 1 << 20
    max_wait_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """pace_s: seconds for one place to come free for the tenant; 0: unknown, or no place would
    help."""

    sequence: Sequence
    message: str
    retry_after_s: float
    pace_s: float = 0.0


class DrainRate:
    """Requests and prompt tokens a second that leave a backlogged queue."""

    def __init__(self) -> None:
        self._seconds = self._requests = self._tokens = 0.0
        self._backlogged_at_s: float | None = None

    def note(self, now: float, num_requests: int, num_tokens: int, *, is_backlogged: bool) -> None:
        """Records what left the queue since the last call, and whether it is still backlogged."""
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
        """Seconds until so many have left; 0 before enough was measured. Assumes one departure now,
        so that the estimate stays finite while long answers hold every slot."""
        if self._seconds < MIN_MEASURED_S:
            return 0.0
        num_left = self._requests
        if num_tokens:
            num_left = min(num_left, self._tokens * num_requests / num_tokens)
        return self._seconds * num_requests / (num_left + 1)


class QueueLimits:
    """Bounds of one queue, and the rate at which it drains."""

    def __init__(
        self, queue: FairQueue, bounds: QueueBounds, step_time: StepTime, tokens_a_step: int
    ) -> None:
        """step_time: predicts the work ahead, from the first burst on. tokens_a_step: at most."""
        self._queue = queue
        self._bounds = bounds
        self._step_time = step_time
        self._tokens_a_step = tokens_a_step
        self._rate = DrainRate()
        self._num_started = self._num_started_tokens = 0
        """Sequences, and their tokens, that left the queue since the last step."""

    def note_started(self, sequence: Sequence) -> None:
        """Counts a sequence that leaves the queue to run."""
        self._num_started += 1
        self._num_started_tokens += len(sequence.tokens)

    def note_step(self, now: float, *, is_backlogged: bool) -> None:
        """Records the departures of a step. is_backlogged: sequences still wait for slots, pages or
        time; for an adapter or base model does not count."""
        counts = self._num_started, self._num_started_tokens
        self._rate.note(now, *counts, is_backlogged=is_backlogged)
        self._num_started = self._num_started_tokens = 0

    def refuse_for(
        self, newcomer: Sequence, now: float, num_free_slots: int, running: Iterable[Sequence]
    ) -> list[Refusal]:
        """Sequences to refuse so that the newcomer may wait: none, other ones, or the newcomer
        alone."""
        request = newcomer.request
        if request.num_resumed:
            return []
        tenant = self._queue.tenant(request.service_class, request.tenant, request.weight)
        bounds = self._bounds
        wait_s = max(
            self._wait_s(tenant, newcomer, num_free_slots), self._work_ahead_s(tenant, running)
        )
        max_wait_s = bounds.max_wait_s * tenant.class_queue.terms.ttft_s / _INTERACTIVE.ttft_s
        if wait_s > min(max_wait_s, newcomer.expires_s - newcomer.arrival_s):
            message = f"a first token would take about {wait_s:.0f} s"
            return [self._refusal(newcomer, tenant, message, now, is_full=wait_s > max_wait_s)]
        if self._queue.num_waiting == 0:
            return []  # a prompt longer than the queue could otherwise never enter it
        return self._push_out(newcomer, tenant, now)

    def _push_out(self, newcomer: Sequence, tenant: TenantQueue, now: float) -> list[Refusal]:
        """Refuses as many as the newcomer needs, of tenants further above their share."""
        num_requests, num_tokens = 1, len(newcomer.tokens)
        own = self._fullness(tenant, num_requests, num_tokens)
        victims: list[Sequence] = []
        while not self._has_room(num_requests, num_tokens):
            victim = self._fullest(victims, own)
            if victim is None:
                return [self._refusal(newcomer, tenant, "the queue is full", now)]
            victims.append(victim)
            num_requests, num_tokens = num_requests - 1, num_tokens - len(victim.tokens)
        message = "the queue is full, and others have less than their share of it"
        return [self._refusal(victim, victim.tenant_queue, message, now) for victim in victims]

    def _has_room(self, num_requests: int, num_tokens: int) -> bool:
        """Whether so many more fit."""
        queue, bounds = self._queue, self._bounds
        return (
            queue.num_waiting + num_requests <= bounds.max_requests
            and queue.num_waiting_tokens + num_tokens <= bounds.max_tokens
        )

    def _fullest(self, gone: list[Sequence], above: float) -> Sequence | None:
        """The newest waiting request of the tenant furthest above its share of the queue, `gone`
        not counted, if it is further above than `above`."""
        best: Sequence | None = None
        for tenant in self._tenants():
            own = [sequence for sequence in gone if sequence.tenant_queue is tenant]
            num_tokens = sum(len(sequence.tokens) for sequence in own)
            fullness = self._fullness(tenant, -len(own), -num_tokens)
            if fullness > above and (newest := _newest(tenant, own)) is not None:
                best, above = newest, fullness
        return best

    def _fullness(self, tenant: TenantQueue, num_requests: int, num_tokens: int) -> float:
        """Part of the tenant's share of the queue that is used with so many more; 1 is full."""
        requests = (tenant.num_waiting + num_requests) / self._bounds.max_requests
        tokens = (tenant.num_waiting_tokens + num_tokens) / self._bounds.max_tokens
        return max(requests, tokens) / self._share(tenant)

    def _wait_s(self, tenant: TenantQueue, newcomer: Sequence, num_free_slots: int) -> float:
        """Seconds the newcomer waits behind its tenant's other requests, at the tenant's share of
        the drain rate. Without a backlog, free slots are taken at once."""
        share = self._share(tenant)
        num_requests = (tenant.num_waiting + 1) / share
        num_tokens = (tenant.num_waiting_tokens + len(newcomer.tokens)) / share
        num_behind = num_requests if self._rate.is_backlogged else num_requests - num_free_slots
        if self._queue.num_waiting == 0 or num_behind <= 0:
            return 0.0
        return self._rate.seconds_for(num_behind, num_tokens * num_behind / num_requests)

    def _work_ahead_s(self, tenant: TenantQueue, running: Iterable[Sequence]) -> float:
        """Seconds that the tenant's accepted requests still take at its share of the device, by
        predicted step times: the uncomputed part of their prompts, and some output of each. 0
        before a step was measured."""
        begun = [s for s in running if s.tenant_queue is tenant and s.is_prefilling]
        num_requests = tenant.num_waiting + len(begun)
        if not num_requests:
            return 0.0
        num_tokens = tenant.num_waiting_tokens + sum(s.num_uncomputed for s in begun)
        context = num_tokens / num_requests / 2
        num_ahead = num_tokens + ASSUMED_OUTPUT * num_requests
        seconds = self._step_time.prompt_seconds(num_ahead, context, self._tokens_a_step)
        return seconds / self._share(tenant)

    def _pace_s(self, sequence: Sequence, tenant: TenantQueue) -> float:
        """Seconds for one place to come free for the tenant: as measured, else as predicted."""
        measured_s = self._rate.seconds_for(1 / self._share(tenant), 0.0)
        if measured_s:
            return measured_s
        num_tokens = len(sequence.tokens)
        num_ahead, context = num_tokens + ASSUMED_OUTPUT, num_tokens / 2
        predicted_s = self._step_time.prompt_seconds(num_ahead, context, self._tokens_a_step)
        return predicted_s / self._share(tenant)

    def _refusal(
        self,
        sequence: Sequence,
        tenant: TenantQueue,
        message: str,
        now: float,
        is_full: bool = True,
    ) -> Refusal:
        """A refusal whose retry time lies one place behind the tenant's last refused request.
        is_full: another request of the tenant would have been refused too."""
        pace_s = self._pace_s(sequence, tenant)
        room_s = max(tenant.next_room_s, now) + pace_s
        tenant.next_room_s = min(room_s, now + MAX_RETRY_S)
        retry_s = max(tenant.next_room_s - now, 1.0)
        return Refusal(sequence, message, retry_s, pace_s if is_full else 0.0)

    def _share(self, tenant: TenantQueue) -> float:
        """The tenant's part of the queue among all tenants that wait and itself."""
        classes = [
            each
            for each in self._queue.classes.values()
            if each.active or each is tenant.class_queue
        ]
        class_share = tenant.class_queue.terms.share / sum(each.terms.share for each in classes)
        others = tenant.class_queue.active.values()
        weight = sum(other.weight for other in others if other is not tenant) + tenant.weight
        return class_share * tenant.weight / weight

    def _tenants(self) -> Iterator[TenantQueue]:
        for class_queue in self._queue.classes.values():
            yield from class_queue.active.values()


_INTERACTIVE = TERMS[ServiceClass.INTERACTIVE]


def _newest(tenant: TenantQueue, gone: list[Sequence]) -> Sequence | None:
    """The tenant's newest waiting sequence that may be refused."""
    candidates = (
        sequence
        for sequence in tenant.pending[tenant.num_started :]
        if sequence.num_generated == 0 and sequence not in gone
    )
    return max(candidates, key=lambda sequence: sequence.arrival_s, default=None)
