"""Whose turn it is: classes with guaranteed shares, and in each class tenants by weighted virtual
token counters (VTC). No tensors and no clock; what fits is the scheduler's to decide.

Work is charged to its class and to its tenant's account there, in tokens by share or weight.
Whoever was charged least is next, so that a class or tenant that waits falls behind nobody for
long, and what one does not use the others have. Who comes back is lifted to the least of those who
stayed: idleness is no credit.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from workers.wire.protocol import ServiceClass

if TYPE_CHECKING:
    from workers.scheduling.sequence import Sequence

PREFILL_COST = 1.0
DECODE_COST = 2.0
CACHED_COST = 0.1
"""Of a token: computed in the prompt, generated, taken from the prefix cache."""
RECENT_TOKENS = 4096.0
"""After so many charged to others, what a tenant was charged counts for 1/e of late."""
LEEWAY = 0.25
"""Of what others are entitled to, that a tenant may have had of late and be nobody's guest."""
MAX_ACCOUNTS = 1024
"""Of a class; beyond, those without work that a return would lift anyway are forgotten."""
MAX_PASSED = 64
"""Sequences of a tenant that could not begin in this step before the rest of its own are left for
the next: what looking costs is bounded, and others do not wait for it."""


class Terms(NamedTuple):
    """What a class is promised: its share while others want the device too, and how late its first
    token and each later one may be."""

    share: float
    ttft_s: float
    tpot_s: float


TERMS = {
    ServiceClass.INTERACTIVE: Terms(0.6, 1.0, 0.1),
    ServiceClass.STANDARD: Terms(0.3, 4.0, 0.2),
    ServiceClass.BATCH: Terms(0.1, 60.0, 2.0),
}


Turn = tuple[float, float, int]


@dataclass(slots=True, eq=False)
class Account:
    """A tenant in one class. Its counter is of tokens charged, divided by its weight."""

    line: Line
    tenant: str
    weight: int
    counter: float = 0.0
    pending: list[Sequence] = field(default_factory=list["Sequence"])
    """Whose prompt is not computed: those begun first, then by `Sequence.order`."""
    num_sequences: int = 0
    """Pending, or generating."""
    num_started: int = 0
    """Of the pending."""
    num_waiting_tokens: int = 0
    """Of the pending that have not started."""
    since: int = 0
    """Numbers the times at which somebody began to have something pending."""
    next_room_s: float = 0.0
    """Until when those who were refused have been told to wait."""
    recent_part: float = 0.0
    """Of what was charged of late, as it was when `recent_at` had been charged to all."""
    recent_at: float = 0.0

    @property
    def turn(self) -> Turn:
        """Of two that were charged alike, as who came back is with the least of those who stayed,
        first who has less running."""
        return self.counter, self.num_running / self.weight, self.since

    @property
    def num_waiting(self) -> int:
        return len(self.pending) - self.num_started

    @property
    def num_running(self) -> int:
        return self.num_sequences - self.num_waiting


@dataclass(slots=True, eq=False)
class Line:
    """A class: its counter is of tokens charged, divided by its share."""

    terms: Terms
    counter: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    active: dict[str, Account] = field(default_factory=dict[str, Account])
    """Those with something pending."""
    floor: float = 0.0
    """The counter of the account that was the last to have something pending."""
    weight: int = 0
    """Of its tenants with work."""
    max_accounts: int = MAX_ACCOUNTS

    @property
    def least(self) -> float:
        """What a returning account is lifted to."""
        return min((account.counter for account in self.active.values()), default=self.floor)

    @property
    def num_waiting(self) -> int:
        return sum(account.num_waiting for account in self.active.values())


class FairQueue:
    """The sequences of a scheduler that are pending, in the order in which they are due.

    A sequence is added, starts, may be put back, and leaves when its prompt is computed; it is
    removed at its end, whatever its state.
    """

    def __init__(self) -> None:
        self.lines = {service_class: Line(terms) for service_class, terms in TERMS.items()}
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._floor = 0.0
        """The counter of the line that was the last to have something pending."""
        self._num_activations = 0
        self._num_charged = 0.0

    def account(self, service_class: ServiceClass, tenant: str, weight: int) -> Account:
        """Theirs, or a new one that is not kept before it has work."""
        line = self.lines[service_class]
        return line.accounts.get(tenant) or Account(line, tenant, weight)

    @property
    def has_pending(self) -> bool:
        return any(line.active for line in self.lines.values())

    @property
    def weight(self) -> int:
        """Of all tenants with work here."""
        return sum(line.weight for line in self.lines.values())

    @property
    def waiting(self) -> list[Sequence]:
        """In no order."""
        accounts = [a for line in self.lines.values() for a in line.active.values()]
        return [s for account in accounts for s in account.pending[account.num_started :]]

    def add(self, sequence: Sequence) -> None:
        """It waits. Its tenant has from now on the weight that it names."""
        request = sequence.request
        account = self.account(request.service_class, request.tenant, request.weight)
        sequence.account = account
        account.line.accounts[request.tenant] = account
        if account.num_sequences:
            account.line.weight -= account.weight
        account.weight = request.weight
        account.num_sequences += 1
        account.line.weight += account.weight
        self._insert(sequence)

    def start(self, sequence: Sequence) -> None:
        """It has what it needs to run; the scheduler has changed its status."""
        account = sequence.account
        account.pending.remove(sequence)
        insort(account.pending, sequence, key=_turn)
        account.num_started += 1
        self._count(account, -1, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It has lost what it needs, and waits again; the scheduler has changed its status."""
        account = sequence.account
        if sequence.is_pending:
            account.pending.remove(sequence)
            account.num_started -= 1
        self._insert(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Its prompt is computed: it needs no turn any more."""
        sequence.account.num_started -= 1
        self._take_out(sequence)

    def remove(self, sequence: Sequence, *, is_waiting: bool) -> None:
        account = sequence.account
        if is_waiting:
            self._count(account, -1, sequence)
            self._take_out(sequence)
        elif sequence.is_pending:
            self.leave(sequence)
        account.num_sequences -= 1
        if account.num_sequences == 0:
            account.line.weight -= account.weight
            _forget(account.line)

    def charge(self, sequence: Sequence, cost: float) -> None:
        """Tokens' worth of work done for it."""
        account = sequence.account
        account.counter += cost / account.weight
        account.line.counter += cost / account.line.terms.share
        part = self._recent_part(account)
        account.recent_part = part - (1.0 - part) * math.expm1(-cost / RECENT_TOKENS)
        self._num_charged += cost
        account.recent_at = self._num_charged

    def share(self, account: Account) -> float:
        """What an account with work is entitled to, by its class and its weight there, among all
        with work."""
        line = account.line
        of_lines = sum(each.terms.share for each in self.lines.values() if each.weight)
        return line.terms.share / of_lines * account.weight / line.weight

    def is_guest(self, account: Account) -> bool:
        """Of late it had more than its share and some leeway: it lives on what others leave."""
        if account.recent_part <= LEEWAY:
            return False
        return self._recent_part(account) > with_leeway(self.share(account))

    def _recent_part(self, account: Account) -> float:
        num_since = self._num_charged - account.recent_at
        return account.recent_part * math.exp(-num_since / RECENT_TOKENS)

    def in_turn(self, is_full: Callable[[Account], bool]) -> Iterator[Sequence]:
        """Pending sequences, each once; those that wait only as long as it is not full for them.
        The most due is found when it is asked for, so that what was charged for those before it
        counts. They may start, leave or be put back meanwhile."""
        heaps: dict[Line, list[tuple[Turn, Account]]] = {}
        for line in self.lines.values():
            accounts = [a for a in line.active.values() if a.num_started or not is_full(a)]
            if heap := [(account.turn, account) for account in accounts]:
                heapify(heap)
                heaps[line] = heap
        reached: dict[Account, Iterator[Sequence]] = {}
        while heaps:
            line = min(heaps, key=_counter)
            heap = heaps[line]
            turn, account = heap[0]
            if account not in reached:
                reached[account] = _in_order(account, is_full)
            sequence = next(reached[account], None)
            if sequence is not None:
                yield sequence
                if account.counter != turn[0]:
                    heapreplace(heap, (account.turn, account))
            else:
                heappop(heap)
                if not heap:
                    del heaps[line]

    def _insert(self, sequence: Sequence) -> None:
        account = sequence.account
        line = account.line
        if not account.pending:
            if not line.active:
                others = (other.counter for other in self.lines.values() if other.active)
                line.counter = max(line.counter, min(others, default=self._floor))
            account.counter = max(account.counter, line.least)
            self._num_activations += 1
            account.since = self._num_activations
            line.active[account.tenant] = account
        insort(account.pending, sequence, key=_turn)
        sequence.is_pending = True
        self._count(account, 1, sequence)

    def _take_out(self, sequence: Sequence) -> None:
        account = sequence.account
        line = account.line
        account.pending.remove(sequence)
        sequence.is_pending = False
        if not account.pending:
            del line.active[account.tenant]
            if not line.active:
                line.floor = account.counter
            if not any(other.active for other in self.lines.values()):
                self._floor = line.counter

    def _count(self, account: Account, sign: int, sequence: Sequence) -> None:
        num_tokens = sign * len(sequence.tokens)
        account.num_waiting_tokens += num_tokens
        self.num_waiting += sign
        self.num_waiting_tokens += num_tokens


def with_leeway(share: float) -> float:
    """The share, and some of what the others are entitled to."""
    return share + LEEWAY * (1.0 - share)


def last_in_turn(sequences: Iterable[Sequence]) -> Sequence:
    """Who gives way when memory is short: batch first, then the class and in it the tenant that was
    charged most, of theirs the newest."""

    def key(sequence: Sequence) -> tuple[bool, float, float, float]:
        account = sequence.account
        is_batch = sequence.request.service_class is ServiceClass.BATCH
        return is_batch, account.line.counter, account.counter, sequence.arrival_s

    return max(sequences, key=key)


def _turn(sequence: Sequence) -> tuple[bool, int, float, float]:
    return (sequence.is_waiting, *sequence.order)


def _counter(line: Line) -> float:
    return line.counter


def _forget(line: Line) -> None:
    """Accounts without work that a return would lift, once there are many."""
    if len(line.accounts) <= line.max_accounts:
        return
    least = line.least
    line.accounts = {
        tenant: account
        for tenant, account in line.accounts.items()
        if account.num_sequences or account.counter > least
    }
    line.max_accounts = max(MAX_ACCOUNTS, 2 * len(line.accounts))


def _in_order(account: Account, is_full: Callable[[Account], bool]) -> Iterator[Sequence]:
    """Those of one tenant, until so many one after the other were charged nothing, or none may
    begin any more."""
    num_passed = 0
    for sequence in account.pending.copy():
        if num_passed == MAX_PASSED or (sequence.is_waiting and is_full(account)):
            return
        before = account.counter
        yield sequence
        num_passed = num_passed + 1 if account.counter == before else 0
