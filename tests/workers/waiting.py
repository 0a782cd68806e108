"""The fair policy of a scheduler, and the sequences that wait in it."""

from __future__ import annotations

from workers.policies.fairness_policy import FairnessPolicy
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence


def fair_policy(scheduler: Scheduler) -> FairnessPolicy:
    assert isinstance(scheduler.policy, FairnessPolicy)
    return scheduler.policy


def waiting_of(scheduler: Scheduler) -> list[Sequence]:
    """In no order."""
    classes = fair_policy(scheduler).queue.classes.values()
    tenants = [tenant for queue in classes for tenant in queue.active.values()]
    return [s for tenant in tenants for s in tenant.pending[tenant.num_started :]]
