"""Remembers queues that have just refused, and refuses requests that they would refuse before their
prompts are tokenised. So too many requests cost a worker no more than the places that it has.

A worker that refuses for want of room says how long one place takes to come free for the tenant. So
long it is not asked again for that tenant, unless an answer of ours has ended there meanwhile, or
for what is smaller than what was refused, which may find room. A large request needs many places,
and its refusal takes as much of the worker's time as that of many small ones. So it is offered less
often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import MAX_RETRY_S, ErrorCode, Generate, ServiceClass

ASK_AGAIN_S = 0.25
"""No estimate is believed for longer, of a request that is not large."""
LARGE = 64 << 10
"""Bytes of a request beyond which a refusal holds as much longer as the request is larger."""
MANY = 64
"""From so many remembered refusals on, those that are over are removed."""


Line = tuple[str, str, ServiceClass]
"""Whose requests stand in one line at a worker: digest of the model, id of the tenant, class."""


@dataclass(slots=True)
class Refused:
    num_bytes: int
    """Size of the smallest request that was refused."""
    until: float
    num_finished: int
    """At the worker, by then."""
    pace_s: float
    next_room_at: float
    """Told to the client that was refused last; the next is told a later time."""

    def holds(self, worker: WorkerClient, now: float, num_bytes: int) -> bool:
        """For a request of this size."""
        is_as_full = worker.num_finished == self.num_finished or self.num_bytes > LARGE
        return now < self.until and is_as_full and num_bytes >= self.num_bytes


class FullQueues:
    """The full queues of all workers, as one gateway has heard of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[WorkerClient, Line], Refused] = {}
        self._forget_at = MANY

    def __len__(self) -> int:
        """Refusals remembered; mostly none, and then nothing need be checked."""
        return len(self._refused)

    def note(
        self, worker: WorkerClient, request: Generate, num_bytes: int, failure: WorkerFailed
    ) -> None:
        """`num_bytes`: of the body that the request came in. A failure for another reason than want
        of room says nothing."""
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
        """Those of these workers that have just refused such a request. Raises WorkerFailed as they
        would if all have."""
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
        """Those of these workers that have just refused such a request."""
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
        """All whose last refused is to have come again by now."""
        for key in [key for key, each in self._refused.items() if each.next_room_at <= now]:
            del self._refused[key]
        self._forget_at = max(MANY, 2 * len(self._refused))


def _line_of(request: Generate) -> Line:
    return request.model, request.tenant, request.service_class
