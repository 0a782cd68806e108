"""Remembers queues that have just refused, and refuses such requests before their prompts are
tokenised, so that too many requests cost a worker little more than those it can queue.

A refusing worker reports how long it takes until one place becomes free for the tenant. For that
time the gateway does not ask again, unless one of its requests has ended there, or the request is
smaller than the one refused and so may find room. A large request needs many places, and its
refusal costs the worker as much as those of many small ones, so it is offered less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import MAX_RETRY_S, ErrorCode, Generate, ServiceClass

ASK_AGAIN_S = 0.25
"""Maximum seconds that an estimate is used, except for a large request."""
LARGE = 64 << 10
"""Bytes above which a refusal is remembered longer, in proportion to the size."""
MANY = 64
"""Minimum number of remembered refusals at which expired ones are removed."""


Line = tuple[str, str, ServiceClass]
"""Requests that share a line at a worker: digest of the model, id of the tenant, class."""


@dataclass(slots=True)
class Refused:
    num_bytes: int
    """Bytes of the smallest request that was refused."""
    until: float
    num_finished: int
    """Requests that the worker had finished at the refusal."""
    pace_s: float
    next_room_at: float
    """Time reported to the client refused last. The next client gets a later one."""

    def holds(self, worker: WorkerClient, now: float, num_bytes: int) -> bool:
        """Returns whether the refusal applies to a request of `num_bytes`."""
        is_as_full = worker.num_finished == self.num_finished or self.num_bytes > LARGE
        return now < self.until and is_as_full and num_bytes >= self.num_bytes


class FullQueues:
    """Full queues of all workers, as reported to one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[WorkerClient, Line], Refused] = {}
        self._forget_at = MANY

    def __len__(self) -> int:
        """Returns the number of remembered refusals. Usually 0, so that no check is needed."""
        return len(self._refused)

    def note(
        self, worker: WorkerClient, request: Generate, num_bytes: int, failure: WorkerFailed
    ) -> None:
        """Records a refusal. Ignores failures for other reasons than lack of room. `num_bytes` is
        the size of the request's body."""
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
        """Returns the workers that have just refused such a request. Raises WorkerFailed if all
        have, as they would."""
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
        """Returns the workers that have just refused such a request."""
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
        """Removes refusals whose clients should have retried by now."""
        for key in [key for key, each in self._refused.items() if each.next_room_at <= now]:
            del self._refused[key]
        self._forget_at = max(MANY, 2 * len(self._refused))


def _line_of(request: Generate) -> Line:
    return request.model, request.tenant, request.service_class
