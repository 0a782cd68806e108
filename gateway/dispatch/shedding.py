"""Remembers workers whose queues have just refused a request, and refuses similar requests before
their prompts are tokenised, so that an overload costs the workers little.

A worker that refuses a request reports how long it takes until one place in its queue becomes free
for the tenant. During that time the gateway sends the worker no similar requests, unless one of the
gateway's requests has ended there, or the new request is smaller than the refused one and so may
find room. A large request needs many places, and refusing it costs the worker as much as refusing
many small ones. Therefore the refusal of a large request applies for longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import MAX_RETRY_S, ErrorCode, Generate, ServiceClass

ASK_AGAIN_S = 0.25
"""Maximum seconds for which a refusal applies to similar requests, if the refused request had at
most LARGE bytes."""
LARGE = 64 << 10
"""Size of a request's body in bytes above which a refusal applies for longer than ASK_AGAIN_S, in
proportion to the size."""
MANY = 64
"""Minimum number of remembered refusals at which expired ones are removed."""


Line = tuple[str, str, ServiceClass]
"""Key of a queue at a worker, as (digest of the model, tenant id, service class)."""


@dataclass(slots=True)
class Refused:
    num_bytes: int
    """Bytes of the smallest body that was refused."""
    until: float
    num_finished: int
    """Number of this gateway's sequences that had ended at the worker at the time of the
    refusal."""
    pace_s: float
    next_room_at: float
    """Time at which the client that was refused last was told to retry. The next client is told a
    later time."""

    def holds(self, worker: WorkerClient, now: float, num_bytes: int) -> bool:
        """Returns whether the refusal applies to a request of `num_bytes`."""
        is_as_full = worker.num_finished == self.num_finished or self.num_bytes > LARGE
        return now < self.until and is_as_full and num_bytes >= self.num_bytes


class FullQueues:
    """Recent refusals by workers whose queues were full, as reported to one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[WorkerClient, Line], Refused] = {}
        self._forget_at = MANY

    def __len__(self) -> int:
        """Returns the number of remembered refusals. It is usually 0, so that callers can skip the
        check."""
        return len(self._refused)

    def note(
        self, worker: WorkerClient, request: Generate, num_bytes: int, failure: WorkerFailed
    ) -> None:
        """Records that a worker refused a request because its queue was full. Ignores a failure
        with another reason. `num_bytes` is the size of the request's body."""
        if not failure.pace_s:
            return
        now = self._clock()
        key = worker, _line_of(request)
        next_room_at = now + failure.retry_after_s
        if (known := self._refused.get(key)) is not None:
            next_room_at = max(next_room_at, known.next_room_at)
            if known.holds(worker, now, known.num_bytes):
                num_bytes = min(num_bytes, known.num_bytes)
        until = now + min(failure.pace_s, ASK_AGAIN_S)
        if num_bytes > LARGE:
            until = now + ASK_AGAIN_S * num_bytes / LARGE
        self._refused[key] = Refused(
            num_bytes, until, worker.num_finished, failure.pace_s, next_room_at
        )
        if len(self._refused) >= self._forget_at:
            self._forget(now)

    def check(
        self, workers: Sequence[WorkerClient], line: Line, num_bytes: int
    ) -> Sequence[WorkerClient]:
        """Returns the workers that have just refused a similar request. Raises WorkerFailed, as a
        worker's own refusal does, if all of `workers` have just refused one."""
        now = self._clock()
        found = self._full(workers, line, num_bytes, now)
        if not found or len(found) < len(workers):
            return list(found)
        soonest = min(found.values(), key=lambda refused: refused.next_room_at)
        soonest.next_room_at = min(soonest.next_room_at + soonest.pace_s, now + MAX_RETRY_S)
        retry_s = soonest.next_room_at - now
        raise WorkerFailed(ErrorCode.OVERLOADED, "the queue was full a moment ago", retry_s)

    def full(
        self, workers: Sequence[WorkerClient], request: Generate, num_bytes: int
    ) -> Sequence[WorkerClient]:
        """Returns the workers that have just refused a similar request."""
        return list(self._full(workers, _line_of(request), num_bytes, self._clock()))

    def _full(
        self, workers: Sequence[WorkerClient], line: Line, num_bytes: int, now: float
    ) -> dict[WorkerClient, Refused]:
        found: dict[WorkerClient, Refused] = {}
        for worker in workers:
            refused = self._refused.get((worker, line))
            if refused is not None and refused.holds(worker, now, num_bytes):
                found[worker] = refused
        return found

    def _forget(self, now: float) -> None:
        """Removes refusals for which the time to retry has passed."""
        for key in [key for key, each in self._refused.items() if each.next_room_at <= now]:
            del self._refused[key]
        self._forget_at = max(MANY, 2 * len(self._refused))


def _line_of(request: Generate) -> Line:
    return request.model, request.tenant, request.service_class
