"""Queues of a service class and of a tenant in it, with the charges of each. Plain data;
`FairQueue` determines the order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from workers.wire.protocol import ServiceClass

Item = TypeVar("Item")

MAX_TENANTS = 1024
"""Number of tenants of a class beyond which `forget_idle` drops idle ones."""


class Terms(NamedTuple):
    """Terms of a service class.

    share: fraction of the device while other classes have work. ttft_s: seconds to the first token.
    tpot_s: seconds to each later token. gap_factor: maximum gap between two tokens, in multiples of
    `max_token_gap`.
    """

    share: float
    ttft_s: float
    tpot_s: float
    gap_factor: float


TERMS = {
    ServiceClass.INTERACTIVE: Terms(0.6, 1.0, 0.1, 1),
    ServiceClass.STANDARD: Terms(0.3, 4.0, 0.2, 1),
    ServiceClass.BATCH: Terms(0.1, 60.0, 2.0, 8),
}

Turn = tuple[float, float, int]


class Load(NamedTuple):
    """Number of waiting sequences, their tokens, and the tokens that they may still generate."""

    num_requests: float
    num_tokens: float
    num_output: float

    def changed(self, other: Load, sign: int) -> Load:
        """Returns the load with the other one added, or subtracted if `sign` is -1."""
        return Load(
            self.num_requests + sign * other.num_requests,
            self.num_tokens + sign * other.num_tokens,
            self.num_output + sign * other.num_output,
        )

    def with_parts(self, parts: Iterable[tuple[Load, float]]) -> Load:
        """Returns the load with parts of others added, of at most the given tokens each."""
        requests, tokens, output = self
        for (more_requests, more_tokens, more_output), most in parts:
            if most >= more_tokens:
                part = 1.0
            elif most > 0.0:
                part = most / more_tokens
            else:
                continue
            requests += part * more_requests
            tokens += part * more_tokens
            output += part * more_output
        return Load(requests, tokens, output)


NO_LOAD = Load(0, 0, 0)


@dataclass(slots=True, eq=False)
class TenantQueue(Generic[Item]):
    """Tenant in one service class. counter: tokens charged, divided by its weight."""

    class_queue: ClassQueue[Item]
    tenant: str
    weight: int
    counter: float = 0.0
    pending: list[Item] = field(default_factory=list[Any])
    """Sequences whose prompt is not computed: running ones first, then by priority, deadline and
    arrival."""
    num_sequences: int = 0
    """Number of pending and generating sequences."""
    num_started: int = 0
    """Number of pending sequences that run."""
    waiting: Load = NO_LOAD
    """Load of the pending sequences that wait."""
    since: int = 0
    """Number of the activation at which the tenant last began to have pending sequences."""
    recent_part: float = 0.0
    """Fraction of the recently charged tokens that were the tenant's, at `recent_at`. Both are set
    by `OverShare`."""
    recent_at: float = 0.0
    """Tokens charged to all tenants when `recent_part` was computed."""

    @property
    def turn(self) -> Turn:
        """Sort key. Of two tenants with equal charges, such as after idleness, the one with fewer
        running sequences for its weight is first."""
        return self.counter, self.num_running / self.weight, self.since

    @property
    def num_waiting(self) -> int:
        return len(self.pending) - self.num_started

    @property
    def num_running(self) -> int:
        return self.num_sequences - self.num_waiting


@dataclass(slots=True)
class Place(Generic[Item]):
    """Place of a sequence in the queue. Written by the policy."""

    tenant_queue: TenantQueue[Item] = field(init=False)
    """Queue of the tenant that is charged; set when the sequence is queued."""
    is_pending: bool = False
    """Whether it is queued and its tokens are not all computed."""
    num_charged: int = 0
    """Number of tokens charged. Computing them again after a preemption is free."""
    num_shared: int | None = None
    """Tokens that were found in the prefix cache when it was last queued, or are computed for a
    pending sequence before it. None until the cache was searched."""


@dataclass(slots=True, eq=False)
class ClassQueue(Generic[Item]):
    """Service class. counter: tokens charged, divided by its share."""

    terms: Terms
    counter: float = 0.0
    tenants: dict[str, TenantQueue[Item]] = field(default_factory=dict[str, Any])
    active: dict[str, TenantQueue[Item]] = field(default_factory=dict[str, Any])
    """Tenants with pending sequences."""
    floor: float = 0.0
    """Counter of the last tenant that had pending sequences."""
    weight: int = 0
    """Sum of the weights of the tenants with work."""
    max_tenants: int = MAX_TENANTS

    @property
    def least(self) -> float:
        """Counter that a returning tenant is raised to."""
        return min((tenant.counter for tenant in self.active.values()), default=self.floor)

    def forget_idle(self) -> None:
        """Drops tenants without work whose counter a return would raise, once there are many."""
        if len(self.tenants) <= self.max_tenants:
            return
        least = self.least
        self.tenants = {
            name: tenant
            for name, tenant in self.tenants.items()
            if tenant.num_sequences or tenant.counter > least
        }
        self.max_tenants = max(MAX_TENANTS, 2 * len(self.tenants))
