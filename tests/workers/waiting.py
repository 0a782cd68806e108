"""The sequences that wait in a scheduler."""

from __future__ import annotations

from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence


def waiting_of(scheduler: Scheduler) -> list[Sequence]:
    """In no order."""
    classes = scheduler._queue.classes.values()  # pyright: ignore[reportPrivateUsage]
    tenants = [tenant for queue in classes for tenant in queue.active.values()]
    return [s for tenant in tenants for s in tenant.pending[tenant.num_started :]]
