"""Decides which requests a scheduler's queue refuses, and when refused clients may retry.

The queue is bounded in requests, in prompt tokens and in the time until a request's first token.
Each tenant may fill its share. When the queue is full, a newcomer displaces the newest request of
the tenant that fills the largest fraction of its share, if the newcomer's tenant fills a smaller
fraction of its own share. A request is refused when it arrives if its first token is predicted to
be late. A waiting request is refused if its first token becomes late, because steps take longer
than predicted or requests of other tenants arrive. A sequence whose answer has begun is never
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest

from workers.policies.fair_queue import FairQueue
from workers.policies.queue_forecast import QueueForecast, RunningWork
from workers.policies.tenant_queue import MAX_TENANTS, ClassQueue, QueueLoad, TenantQueue
from workers.scheduling.policy import Refusal
from workers.scheduling.sequence import Sequence
from workers.scheduling.terms import TERMS
from workers.wire.protocol import MAX_RETRY_S, ServiceClass

CHECK_S = 0.25
"""Seconds between checks for waiting sequences whose first token will be late."""
MAX_CHECKED = 8
"""Maximum number of tenants per check. The tenants with the most waiting tokens are checked."""
ADMITTED_PART = 0.8
"""Fraction of the maximum wait. A newcomer whose predicted wait exceeds this time is refused. The
fraction is below 1, because forecasts are inexact."""
LATE_PART = 0.9
"""Fraction of the maximum wait. A waiting sequence is late if its past wait plus its predicted
further wait exceed this time. Late sequences are refused unless `SPARED_PART` applies."""
SPARED_PART = 0.05
"""Fraction of the maximum wait. A waiting sequence whose first token is predicted within this time
is not refused, even if it is late."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds of a queue. max_wait_s: maximum seconds until the first token of an interactive
    request. Other classes may wait longer, in proportion to their `Terms.ttft_s`."""

    max_requests: int = 1024
    max_tokens: int = 1 << 20
    max_wait_s: float = 15.0


class QueueLimits:
    """Limits of a fair queue."""

    def __init__(
        self,
        queue: FairQueue,
        forecast: QueueForecast,
        bounds: QueueBounds,
        memory_tokens: Callable[[], int],
        running: Mapping[Sequence, None],
    ) -> None:
        """memory_tokens: function that returns the number of tokens whose KV fits into memory.
        running: running sequences, which the policy keeps up to date."""
        self._queue = queue
        self._running = running
        self._forecast = forecast
        self._bounds = bounds
        self._memory_tokens = memory_tokens
        self._next_check_s = 0.0
        self._held_s = 0.0
        """Last time when no sequence could be admitted, because the base model was unavailable."""
        self._next_retry_s: dict[tuple[ClassQueue, str], float] = {}
        """Latest retry time that was proposed to a refused tenant, by class and tenant."""
        self._max_retries = MAX_TENANTS

    def hold(self, now: float) -> None:
        """Records that no sequence may be admitted at `now`, because the base model is unavailable.
        Time that a sequence waited before `now` does not make it late."""
        self._held_s = now

    def refuse_for(self, newcomer: Sequence, now: float) -> list[Refusal]:
        """Returns refusals of waiting sequences, so that the newcomer can be queued, or a refusal
        of the newcomer alone. Returns an empty list if the newcomer can be queued at once."""
        request = newcomer.request
        if request.num_resumed:
            return []
        tenant = self._queue.tenant(request.service_class, request.tenant, request.weight)
        wait_s, max_wait_s = self._wait_with_s(newcomer, tenant), self._max_wait_s(newcomer)
        limit_s = min(max_wait_s - request.waited_s, newcomer.expires_s - newcomer.times.arrival_s)
        if wait_s > ADMITTED_PART * limit_s and not self._is_idle:
            message = f"a first token would take about {wait_s:.0f} s"
            is_full = wait_s > ADMITTED_PART * max_wait_s
            return [self._refusal(newcomer, tenant, message, now, wait_s, is_full=is_full)]
        if self._queue.num_waiting == 0:
            return []  # so that a prompt longer than the queue can run when the queue is empty
        return self._push_out(newcomer, tenant, now)

    def refuse_late(self, now: float) -> list[Refusal]:
        """Returns refusals of the waiting sequences whose first token is predicted to be late."""
        if now < self._next_check_s:
            return []
        self._next_check_s = now + CHECK_S
        work = self._forecast.running_work(self._running)
        tenants = nlargest(MAX_CHECKED, self._tenants(), key=lambda each: each.waiting.num_tokens)
        return [
            self._refusal(sequence, tenant, "a first token would take too long", now)
            for tenant in tenants
            for sequence in self._late(tenant, now, work)
        ]

    def _late(self, tenant: TenantQueue, now: float, work: RunningWork) -> list[Sequence]:
        """Returns the sequences at the end of the tenant's queue whose first token is predicted to
        be late. work: remaining work of all running sequences."""
        late: list[Sequence] = []
        waiting = tenant.waiting
        for sequence in reversed(tenant.pending[tenant.num_started :]):
            if sequence.num_generated or sequence.times.started_s is not None:
                break
            wait_s, max_wait_s = self._wait_s(tenant, waiting, work), self._max_wait_s(sequence)
            waited_s = sequence.request.waited_s + now - max(sequence.times.arrival_s, self._held_s)
            if waited_s + wait_s <= LATE_PART * max_wait_s or wait_s < SPARED_PART * max_wait_s:
                break
            late.append(sequence)
            waiting = waiting.changed(self._queue.load_of(sequence), -1)
        return late

    @property
    def _is_idle(self) -> bool:
        """Whether a slot is free, and no prompt waits or is being computed."""
        return not self._queue.has_pending and len(self._running) < self._forecast.max_num_seqs

    def _max_wait_s(self, sequence: Sequence) -> float:
        return self._bounds.max_wait_s * sequence.terms.ttft_s / _INTERACTIVE.ttft_s

    def _wait_with_s(self, newcomer: Sequence, tenant: TenantQueue) -> float:
        """Returns the predicted seconds until a newcomer has its first token. The newcomer's prompt
        counts only up to the mean length of waiting prompts, so that long prompts are admitted as
        often as short prompts."""
        num_requests, num_tokens, _ = self._queue.waiting
        load = self._queue.load_of(newcomer)
        num_own = min(load.num_tokens, num_tokens / max(num_requests, 1))
        own = tenant.waiting.changed(load._replace(num_tokens=num_own), 1)
        return self._wait_s(tenant, own, self._forecast.running_work(self._running))

    def _wait_s(self, tenant: TenantQueue, own: QueueLoad, work: RunningWork) -> float:
        """Returns the predicted seconds until all requests of a tenant have their first token. own:
        load of the tenant's requests. work: remaining work of all running sequences."""
        ahead = self._queue.ahead_of(tenant, own)
        num_begun = sum(each.num_uncomputed for each in self._running if each.is_prefilling)
        return self._forecast.seconds(ahead, num_begun, work, self._memory_tokens())

    def _push_out(self, newcomer: Sequence, tenant: TenantQueue, now: float) -> list[Refusal]:
        """Returns refusals of waiting requests, so that there is room for the newcomer. Only
        requests of tenants that fill a larger fraction of their share than the newcomer's tenant
        are refused. If refusing them does not make enough room, returns a refusal of the newcomer
        instead."""
        num_requests, num_tokens = 1, self._queue.load_of(newcomer).num_tokens
        own = self._fullness(tenant, num_requests, num_tokens)
        victims: list[Sequence] = []
        while not self._has_room(num_requests, num_tokens):
            victim = self._fullest(victims, own)
            if victim is None:
                return [self._refusal(newcomer, tenant, "the queue is full", now)]
            victims.append(victim)
            num_requests, num_tokens = (
                num_requests - 1,
                num_tokens - self._queue.load_of(victim).num_tokens,
            )
        message = "the queue is full, and others have less than their share of it"
        return [
            self._refusal(victim, self._queue.tenant_of(victim), message, now) for victim in victims
        ]

    def _has_room(self, num_requests: int, num_tokens: float) -> bool:
        """Whether the queue has room for `num_requests` more requests with `num_tokens` tokens."""
        queue, bounds = self._queue, self._bounds
        return (
            queue.num_waiting + num_requests <= bounds.max_requests
            and queue.num_waiting_tokens + num_tokens <= bounds.max_tokens
        )

    def _fullest(self, gone: list[Sequence], above: float) -> Sequence | None:
        """Returns the newest waiting request of the tenant that fills the largest fraction of its
        share of the queue. Returns None if no tenant fills more than the fraction `above` of its
        share. gone: requests that count as removed from the queue."""
        best: Sequence | None = None
        for tenant in self._tenants():
            own = [sequence for sequence in gone if self._queue.tenant_of(sequence) is tenant]
            num_tokens = sum(self._queue.load_of(sequence).num_tokens for sequence in own)
            fullness = self._fullness(tenant, -len(own), -num_tokens)
            if fullness > above and (newest := _newest(tenant, own)) is not None:
                best, above = newest, fullness
        return best

    def _fullness(self, tenant: TenantQueue, num_requests: int, num_tokens: float) -> float:
        """Returns the fraction of the tenant's share of the queue that is full if `num_requests`
        more requests with `num_tokens` tokens in total are queued."""
        requests = (tenant.num_waiting + num_requests) / self._bounds.max_requests
        tokens = (tenant.waiting.num_tokens + num_tokens) / self._bounds.max_tokens
        return max(requests, tokens) / self._share(tenant)

    def _refusal(
        self,
        sequence: Sequence,
        tenant: TenantQueue,
        message: str,
        now: float,
        wait_s: float | None = None,
        *,
        is_full: bool = True,
    ) -> Refusal:
        """Returns a refusal of the sequence. Retry times of a tenant's refusals follow one another
        at the mean interval in which the tenant's waiting requests start.
        wait_s: predicted seconds until one more request of the tenant has its first token; None if
        not known. is_full: whether the tenant's other requests would all be refused, too."""
        wait_s = self._wait_with_s(sequence, tenant) if wait_s is None else wait_s
        pace_s = wait_s / (tenant.num_waiting + 1)
        last_s = self._next_retry_s.get((tenant.class_queue, tenant.tenant), now)
        next_s = min(max(last_s, now) + pace_s, now + MAX_RETRY_S)
        self._record_retry(tenant, next_s, now)
        return Refusal(sequence, message, max(next_s - now, 1.0), pace_s if is_full else 0.0)

    def _record_retry(self, tenant: TenantQueue, next_s: float, now: float) -> None:
        """Records the retry time that is proposed to the tenant. If many retry times are recorded,
        forgets the retry times that have passed."""
        self._next_retry_s[tenant.class_queue, tenant.tenant] = next_s
        if len(self._next_retry_s) > self._max_retries:
            self._next_retry_s = {
                key: at_s for key, at_s in self._next_retry_s.items() if at_s > now
            }
            self._max_retries = max(MAX_TENANTS, 2 * len(self._next_retry_s))

    def _share(self, tenant: TenantQueue) -> float:
        """Returns the fraction of the queue that the tenant may fill, given the other waiting
        tenants."""
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
    """Returns the tenant's newest waiting sequence that may be refused, or None if there is none.
    gone: sequences that are refused already."""
    candidates = (
        sequence
        for sequence in tenant.pending[tenant.num_started :]
        if sequence.num_generated == 0 and sequence not in gone
    )
    return max(candidates, key=lambda sequence: sequence.times.arrival_s, default=None)
