"""Keeps pending sequences in fair order. Service classes have guaranteed shares, and the tenants of
a class are ordered by weighted virtual token counters (VTC, arXiv:2401.00588).

Work is charged to the counter of its class, in tokens divided by the class's share, and to the
counter of its tenant in that class, in tokens divided by the tenant's weight. The class with the
lowest counter is next, and in this class the tenant with the lowest counter. Unused shares go to
the other classes and tenants. When an idle tenant has pending sequences again, its counter is
raised to the lowest counter of the other tenants with pending sequences, so that idleness earns no
credit.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace

from memory.page_key import PAGE_TOKENS
from workers.policies.tenant_queue import NO_LOAD, ClassQueue, Place, QueueLoad, TenantQueue, Turn
from workers.scheduling.sequence import Sequence
from workers.scheduling.terms import TERMS
from workers.wire.protocol import ServiceClass

MAX_PASSED = 64
"""Maximum number of consecutive sequences of one tenant that are blocked in a step. After them, the
tenant's other sequences are left to the next step, which bounds the time of scheduling."""


class FairQueue:
    """Pending sequences of a scheduler, in the order in which they get tokens."""

    def __init__(self) -> None:
        self.classes = {service_class: ClassQueue(terms) for service_class, terms in TERMS.items()}
        self.waiting = NO_LOAD
        self.places: dict[Sequence, Place] = {}
        """Places of all sequences that have not ended."""
        self._floor = 0.0
        """Counter of the class that was the last to have pending sequences. Used while no class has
        pending sequences."""
        self._of_prompt: dict[bytes, dict[Sequence, None]] = {}
        """Pending sequences by the key of their prompt, in the order in which they were queued. A
        prompt is computed for the first sequence. The other sequences find the prompt in the prefix
        cache."""
        self._num_activations = 0

    def tenant(self, service_class: ServiceClass, tenant: str, weight: int) -> TenantQueue:
        """Returns the tenant's queue in the class, or a new queue. A new queue is kept only once a
        sequence is added to it."""
        class_queue = self.classes[service_class]
        return class_queue.tenants.get(tenant) or TenantQueue(class_queue, tenant, weight)

    def tenant_of(self, sequence: Sequence) -> TenantQueue:
        return self.places[sequence].tenant

    @property
    def num_waiting(self) -> int:
        return int(self.waiting.num_requests)

    @property
    def num_waiting_tokens(self) -> int:
        return int(self.waiting.num_tokens)

    @property
    def has_pending(self) -> bool:
        return any(each.active for each in self.classes.values())

    @property
    def weight(self) -> int:
        """Sum of the weights of all tenants with work."""
        return sum(each.weight for each in self.classes.values())

    def add(self, sequence: Sequence) -> None:
        """Queues a waiting sequence, which is new or was preempted. Sets its tenant's weight to the
        weight of a new sequence's request."""
        request = sequence.request
        if (place := self.places.get(sequence)) is not None:
            if place.is_pending:
                place.tenant.pending.remove(sequence)
                place.tenant.num_started -= 1
            self._insert(sequence, place)
            return
        tenant = self.tenant(request.service_class, request.tenant, request.weight)
        class_queue = tenant.class_queue
        place = self.places[sequence] = Place(tenant, sequence.prompt_key())
        class_queue.tenants[request.tenant] = tenant
        if tenant.num_sequences:
            class_queue.weight -= tenant.weight
        tenant.weight = request.weight
        tenant.num_sequences += 1
        class_queue.weight += tenant.weight
        self._insert(sequence, place)

    def start(self, sequence: Sequence) -> None:
        """Records that the sequence runs. Called after the sequence's status has changed."""
        tenant = self.tenant_of(sequence)
        tenant.pending.remove(sequence)
        insort(tenant.pending, sequence, key=_turn)
        tenant.num_started += 1
        self._count(tenant, -1, sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes a running sequence from the pending ones, because its prompt is computed."""
        self.tenant_of(sequence).num_started -= 1
        self._take_out(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends. Called before the sequence's status changes."""
        tenant = self.tenant_of(sequence)
        if sequence.is_waiting:
            self._count(tenant, -1, sequence)
            self._take_out(sequence)
        elif self.places[sequence].is_pending:
            self.leave(sequence)
        del self.places[sequence]
        tenant.num_sequences -= 1
        if tenant.num_sequences == 0:
            tenant.class_queue.weight -= tenant.weight
            tenant.class_queue.forget_idle()

    def charge(self, tenant: TenantQueue, cost: float) -> None:
        """Charges work done for the tenant, in tokens."""
        tenant.counter += cost / tenant.weight
        tenant.class_queue.counter += cost / tenant.class_queue.terms.share

    def share(self, tenant: TenantQueue) -> float:
        """Returns the fraction of the device that a tenant with work is entitled to, by its class
        and its weight there, among all tenants with work."""
        class_queue = tenant.class_queue
        of_classes = sum(each.terms.share for each in self.classes.values() if each.weight)
        return class_queue.terms.share / of_classes * tenant.weight / class_queue.weight

    @property
    def _least(self) -> float:
        """Counter to which a class is raised when it has pending sequences again."""
        counters = (each.counter for each in self.classes.values() if each.active)
        return min(counters, default=self._floor)

    def ahead_of(self, tenant: TenantQueue, own: QueueLoad) -> QueueLoad:
        """Returns the waiting load that will be computed by the time when the tenant's load `own`
        is computed, if no more requests are queued. The result includes `own`. Each other tenant
        contributes the load that is computed before its counter reaches the counter that this
        tenant will have at that time. The load of other classes is determined in the same way from
        the counters of the classes."""
        ours = tenant.class_queue
        counter = tenant.counter if tenant.pending else max(tenant.counter, ours.least)
        end = counter + own.num_tokens / tenant.weight
        others = (
            (other.waiting, (end - other.counter) * other.weight)
            for other in ours.active.values()
            if other is not tenant
        )
        load = own.with_parts(others)
        counter = ours.counter if ours.active else max(ours.counter, self._least)
        end = counter + load.num_tokens / ours.terms.share
        classes = (
            (
                NO_LOAD.with_parts((each.waiting, math.inf) for each in other.active.values()),
                (end - other.counter) * other.terms.share,
            )
            for other in self.classes.values()
            if other is not ours and other.active
        )
        return load.with_parts(classes)

    def in_turn(self, is_closed: Callable[[TenantQueue], bool]) -> Iterator[Sequence]:
        """Yields each pending sequence once, in fair order. Omits the waiting sequences of tenants
        for which `is_closed` is true. Chooses each sequence only when the caller requests it, so
        that all earlier charges count. The caller may start, remove and put back sequences during
        the iteration."""
        heaps: dict[ClassQueue, list[tuple[Turn, TenantQueue]]] = {}
        for class_queue in self.classes.values():
            active = class_queue.active.values()
            tenants = [each for each in active if each.num_started or not is_closed(each)]
            if heap := [(tenant.turn, tenant) for tenant in tenants]:
                heapify(heap)
                heaps[class_queue] = heap
        reached: dict[TenantQueue, Iterator[Sequence]] = {}
        while heaps:
            class_queue = min(heaps, key=_counter)
            heap = heaps[class_queue]
            turn, tenant = heap[0]
            if tenant not in reached:
                reached[tenant] = _in_order(tenant, is_closed)
            sequence = next(reached[tenant], None)
            if sequence is not None:
                yield sequence
                if tenant.counter != turn[0]:
                    heapreplace(heap, (tenant.turn, tenant))
            else:
                heappop(heap)
                if not heap:
                    del heaps[class_queue]

    def _insert(self, sequence: Sequence, place: Place) -> None:
        tenant = place.tenant
        class_queue = tenant.class_queue
        if not tenant.pending:
            if not class_queue.active:
                class_queue.counter = max(class_queue.counter, self._least)
            tenant.counter = max(tenant.counter, class_queue.least)
            self._num_activations += 1
            tenant.since = self._num_activations
            class_queue.active[tenant.tenant] = tenant
        insort(tenant.pending, sequence, key=_turn)
        place.is_pending = True
        if place.prompt_key is not None:
            self._of_prompt.setdefault(place.prompt_key, {})[sequence] = None
        place.num_shared = self._num_shared(sequence, place)
        self._count(tenant, 1, sequence)

    def _take_out(self, sequence: Sequence) -> None:
        place = self.places[sequence]
        tenant, class_queue = place.tenant, place.tenant.class_queue
        tenant.pending.remove(sequence)
        place.is_pending = False
        if not tenant.pending:
            del class_queue.active[tenant.tenant]
            if not class_queue.active:
                class_queue.floor = tenant.counter
            if not any(other.active for other in self.classes.values()):
                self._floor = class_queue.counter
        if place.prompt_key is not None:
            self._forget_prompt(place.prompt_key, sequence)

    def _forget_prompt(self, key: bytes, sequence: Sequence) -> None:
        """Removes a sequence that is no longer pending from the sequences with the same prompt. If
        it was the first of these sequences, the prompt will be computed for the next of them. If
        the next one is waiting, the prompt's uncached tokens become part of its load."""
        same = self._of_prompt[key]
        was_first = next(iter(same)) is sequence
        del same[sequence]
        if not same:
            del self._of_prompt[key]
            return
        following = next(iter(same))
        if was_first and following.is_waiting:
            place = self.places[following]
            self._count(place.tenant, -1, following)
            place.num_shared = self._num_shared(following, place)
            self._count(place.tenant, 1, following)

    def _num_shared(self, sequence: Sequence, place: Place) -> int:
        """Returns the number of the sequence's tokens that need not be computed for it, because
        they are cached or will be computed for another pending sequence with the same prompt."""
        num_found = sequence.num_found()
        key = place.prompt_key
        is_first = key is None or next(iter(self._of_prompt[key])) is sequence
        if is_first or not sequence.may_skip_cached:
            return num_found
        return max(num_found, (sequence.num_prompt - 1) // PAGE_TOKENS * PAGE_TOKENS)

    def load_of(self, sequence: Sequence) -> QueueLoad:
        """Returns the load of a waiting sequence, queued or not: the tokens that will be computed
        for it."""
        place = self.places.get(sequence)
        num_shared = sequence.num_found() if place is None else place.num_shared
        num_tokens = len(sequence.tokens)
        return QueueLoad(1, num_tokens - num_shared, sequence.max_len - num_tokens)

    def _count(self, tenant: TenantQueue, sign: int, sequence: Sequence) -> None:
        load = self.load_of(sequence)
        tenant.waiting = tenant.waiting.changed(load, sign)
        self.waiting = self.waiting.changed(load, sign)


def _turn(sequence: Sequence) -> tuple[bool, int, float, float]:
    """Returns the key by which a tenant's sequences are sorted: running sequences first, then by
    higher priority, earlier deadline and earlier arrival."""
    request, arrival_s = sequence.request, sequence.times.arrival_s
    patience_s = sequence.terms.ttft_s
    if request.timeout_s is not None:
        patience_s = min(patience_s, request.timeout_s)
    return sequence.is_waiting, -request.priority, arrival_s + patience_s, arrival_s


def _counter(class_queue: ClassQueue) -> float:
    return class_queue.counter


def _in_order(tenant: TenantQueue, is_closed: Callable[[TenantQueue], bool]) -> Iterator[Sequence]:
    """Yields the pending sequences of one tenant, until `MAX_PASSED` consecutive sequences were
    blocked. Waiting sequences come last. They are omitted if the tenant may start no more sequences
    (`is_closed`)."""
    tenant.num_passed = 0
    for sequence in tenant.pending.copy():
        if tenant.num_passed >= MAX_PASSED or (sequence.is_waiting and is_closed(tenant)):
            return
        before = tenant.counter
        yield sequence
        if tenant.counter != before:
            tenant.num_passed = 0
