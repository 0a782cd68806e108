"""Queues of service classes and of the tenants in each class, with their charges. The queues are
plain data, which `FairQueue` keeps in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.scheduling.sequence import Sequence
from workers.scheduling.terms import Terms

MAX_TENANTS = 1024
"""Number of tenants in a class above which `forget_idle` removes idle tenants."""


Turn = tuple[float, float, int]


class QueueLoad(NamedTuple):
    """Load of waiting sequences: their number, the tokens to compute for them, and the tokens that
    they may still generate."""

    num_requests: float
    num_tokens: float
    num_output: float

    def changed(self, other: QueueLoad, sign: int) -> QueueLoad:
        """Returns this load plus the other load, or minus the other load if `sign` is -1."""
        return QueueLoad(
            self.num_requests + sign * other.num_requests,
            self.num_tokens + sign * other.num_tokens,
            self.num_output + sign * other.num_output,
        )

    def with_parts(self, parts: Iterable[tuple[QueueLoad, float]]) -> QueueLoad:
        """Returns this load plus a fraction of each load in `parts`: the largest fraction that has
        at most the number of tokens given with the load."""
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
        return QueueLoad(requests, tokens, output)


NO_LOAD = QueueLoad(0, 0, 0)


@dataclass(slots=True, eq=False)
class TenantQueue:
    """Queue of one tenant in a service class. counter: tokens charged to the tenant, divided by its
    weight."""

    class_queue: ClassQueue
    tenant: str
    weight: int
    counter: float = 0.0
    pending: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences whose prompt is not fully computed. Running sequences are first; both running and
    waiting sequences are sorted by priority, deadline and arrival."""
    num_sequences: int = 0
    """Number of pending and generating sequences."""
    num_started: int = 0
    """Number of pending sequences that run."""
    num_passed: int = 0
    """Number of consecutive sequences that were blocked in this step."""
    waiting: QueueLoad = NO_LOAD
    """Load of the pending sequences that do not run."""
    since: int = 0
    """Serial number of the tenant's last activation, counted over all tenants. A tenant becomes
    active when it gets a pending sequence and had none."""
    recent_part: float = 0.0
    """Fraction of the recently charged tokens that was charged to the tenant, as of `recent_at`.
    `OverShare` sets both attributes."""
    recent_at: float = 0.0
    """Total tokens charged to all tenants when `recent_part` was computed."""

    @property
    def turn(self) -> Turn:
        """Sort key of the tenant, by its charges. If two tenants have equal charges, such as after
        idleness, the tenant with fewer running sequences relative to its weight is first."""
        return self.counter, self.num_running / self.weight, self.since

    @property
    def charge(self) -> tuple[float, float]:
        return self.class_queue.counter, self.counter

    @property
    def num_waiting(self) -> int:
        return len(self.pending) - self.num_started

    @property
    def num_running(self) -> int:
        return self.num_sequences - self.num_waiting


@dataclass(slots=True)
class Place:
    """Place of a sequence in the queue."""

    tenant: TenantQueue
    """Queue of the tenant that is charged."""
    prompt_key: bytes | None
    """Key of the prompt (see `Sequence.prompt_key`)."""
    is_pending: bool = False
    """Whether the sequence is queued and some of its tokens are not computed."""
    num_charged: int = 0
    """Number of tokens, from the first one, that were charged. They are not charged again if they
    are recomputed after a preemption."""
    num_shared: int = 0
    """Number of tokens that were in the prefix cache when the sequence was last queued, or that are
    computed for an earlier pending sequence."""


@dataclass(slots=True, eq=False)
class ClassQueue:
    """Queues of one service class. counter: tokens charged to the class, divided by its share."""

    terms: Terms
    counter: float = 0.0
    tenants: dict[str, TenantQueue] = field(default_factory=dict[str, TenantQueue])
    active: dict[str, TenantQueue] = field(default_factory=dict[str, TenantQueue])
    """Tenants with pending sequences, by name."""
    floor: float = 0.0
    """Value of `least` while no tenant is active: counter of the tenant that was active last."""
    weight: int = 0
    """Sum of the weights of the tenants with work."""
    max_tenants: int = MAX_TENANTS

    @property
    def least(self) -> float:
        """Lowest counter of the active tenants. A tenant that becomes active is raised to it."""
        return min((tenant.counter for tenant in self.active.values()), default=self.floor)

    def forget_idle(self) -> None:
        """Removes idle tenants if there are many. Keeps idle tenants whose counter is above
        `least`, because a removed tenant starts again at `least`."""
        if len(self.tenants) <= self.max_tenants:
            return
        least = self.least
        self.tenants = {
            name: tenant
            for name, tenant in self.tenants.items()
            if tenant.num_sequences or tenant.counter > least
        }
        self.max_tenants = max(MAX_TENANTS, 2 * len(self.tenants))
