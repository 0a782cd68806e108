"""Decides what happens to a sequence that its worker refused or lost: it moves, waits or ends.

refused     The worker is draining or does not have the model. The sequence moves to another worker,
            or waits for one.
overloaded  The sequence moves once, to a worker that has not just refused a similar request. If any
            choice has begun, it may move again, wait for a worker, and outlast its deadline.
lost        Before its first token, the sequence is retried on another worker, within the budget of
            retries. After its first token, it continues on another worker. If there is no other
            worker, it waits for one.
lost again  Two workers were lost without a token in between. The sequence waits for their processes
            to connect again. If they do not, it is presumed to have crashed them, and ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.dispatch.fleet import Fleet
from gateway.dispatch.run import Work
from gateway.exceptions import NoWorker, PoisonRequest
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
WINDOW_S = 60
SHARE = 0.1
FLOOR = 32
"""Number of retries in WINDOW_S seconds that are allowed even if few sequences were sent."""
EXCLUDED_S = 1.0
"""Seconds for which a sequence avoids a worker that refused it. After that, the worker's own status
shows whether it accepts requests."""
MAX_WITHOUT_PROGRESS = 2
"""Number of workers lost in a row, without a token in between, at which a sequence is suspected of
crashing them."""
MAX_LOST = 5
"""Total number of lost workers at which a sequence is suspected of crashing them."""
VERDICT_S = 3.0
"""Seconds for which a suspected sequence waits for the processes of its lost workers to connect
again. After that, it is presumed to have crashed them."""
REFUSALS = (ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN)
OVERLOADED = (ErrorCode.OVERLOADED, ErrorCode.MODEL_UNAVAILABLE)


class RetryBudget:
    """Budget of retries: a tenth of the sequences sent in the last minute, but at least `FLOOR`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        """Counts of the last `WINDOW_S` seconds, as [second, sent, retried]."""

    @property
    def has_room(self) -> bool:
        self._now()
        num_sent, num_retried = (sum(each[part] for each in self._seconds) for part in (1, 2))
        return num_retried < max(FLOOR, SHARE * num_sent)

    def note_sent(self, num_sequences: int) -> None:
        self._now()[1] += num_sequences

    def take(self) -> bool:
        """Counts one retry if the budget allows it. Returns False otherwise."""
        if not self.has_room:
            return False
        self._now()[2] += 1
        return True

    def _now(self) -> list[int]:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
            while self._seconds[0][0] <= second - WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]


class Failover:
    """Search for other workers for sequences whose workers have failed, with one budget of retries
    for the whole gateway."""

    def __init__(self, fleet: Fleet, wait_s: float) -> None:
        """`wait_s` is the number of seconds that a sequence waits if no worker is available."""
        self.budget = RetryBudget()
        self.wait_s = wait_s
        self.full = FullQueues()
        self.num_retried = 0
        """Number of sequences sent to another worker before their first token."""
        self.num_resumed = 0
        """Number of sequences continued on another worker after their first token."""
        self.num_poisonous = 0
        self._fleet = fleet

    def find(
        self, request: Generate, excluded: Collection[WorkerClient], num_bytes: int
    ) -> WorkerClient | None:
        """Chooses a worker that is not silent, and counts the sequence as sent to it. Returns None
        if no worker is available, or if all available workers have just refused a similar request.
        `num_bytes` is the size of the request's body."""
        if not request.num_resumed:
            excluded = [*excluded, *self.full.full(self._fleet.clients, request, num_bytes)]
        work = Work.of([request])
        try:
            worker = self._fleet.choose(work, excluded)
        except NoWorker:
            return None
        if worker.is_silent:
            return None
        self._fleet.note_sent(worker, work)
        return worker

    def has_other(self, model: str, worker: WorkerClient) -> bool:
        """Returns whether another worker that is not silent has the base model with this digest."""
        return any(w is not worker and not w.is_silent for w in self._fleet.serving(model))

    def note_move(self, request: Generate) -> None:
        if request.num_resumed:
            self.num_resumed += 1
        else:
            self.num_retried += 1


class RetryState:
    """Failures of one sequence so far, which decide whether and where it may be retried."""

    def __init__(self, failover: Failover) -> None:
        self.failure: Exception = NoWorker("No worker is ready for this model. Try again shortly.")
        """Error with which the sequence ends if it is not retried successfully."""
        self._failover = failover
        self._is_patient = True
        """Whether the sequence may wait for a worker."""
        self._lost: list[tuple[WorkerClient, str]] = []
        """Lost workers with their instance ids."""
        self._num_with_progress = 0
        """Number of workers in `_lost` that were lost before the sequence's last token."""
        self._suspected_at: float | None = None
        self._was_overloaded = False
        self._excluded: dict[WorkerClient, float] = {}
        """Times of time.monotonic() until which each worker is avoided."""
        self._give_up_at: float | None = None

    @property
    def reason(self) -> str:
        """Code of the last failure."""
        return self.failure.code if isinstance(self.failure, WorkerFailed) else "worker_lost"

    @property
    def excluded(self) -> list[WorkerClient]:
        now = time.monotonic()
        return [worker for worker, until in self._excluded.items() if until > now]

    def gives_up(self) -> bool:
        """Returns whether the sequence must not wait longer. The first call starts the wait."""
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + self._failover.wait_s
        return not self._is_patient or now >= self._give_up_at

    def exclude(self, worker: WorkerClient, for_s: float = EXCLUDED_S) -> None:
        self._excluded[worker] = time.monotonic() + for_s

    def note_progress(self) -> None:
        self._num_with_progress = len(self._lost)
        self._give_up_at = None

    def add(
        self,
        failure: WorkerFailed,
        worker: WorkerClient,
        instance_id: str,
        *,
        is_begun: bool,
        is_answering: bool,
    ) -> None:
        """Records a failure. Raises `failure` if the sequence may not move to another worker.
        `instance_id` is the id that the worker had when the sequence was sent. `is_begun` means
        that the sequence has tokens, and `is_answering` that any choice of its request has an
        output."""
        self.failure, self._is_patient = failure, True
        self.exclude(worker, max(EXCLUDED_S, failure.retry_after_s))
        if failure.code is ErrorCode.WORKER_LOST:
            self._lost.append((worker, instance_id))
            if not is_begun and not self._failover.budget.take():
                raise failure
        elif failure.code in OVERLOADED or (is_answering and failure.code is ErrorCode.EXPIRED):
            self._is_patient = is_answering
            if not is_answering and self._was_overloaded:
                raise failure
            self._was_overloaded = True
        elif failure.code not in REFUSALS:
            raise failure

    def is_suspected(self) -> bool:
        """Returns whether the sequence is suspected of crashing its workers, and must not be sent
        to another worker yet. Raises PoisonRequest if the suspicion has lasted for `VERDICT_S`
        seconds, measured from the first call that found it.

        A sequence is suspected while `MAX_WITHOUT_PROGRESS` workers that it lost since its last
        token, or `MAX_LOST` of all that it lost, are dead. A worker is not dead if the process that
        had the sequence is connected again, which its instance id shows, and does not hang in a
        step. A process that was started in its place has another instance id.
        """
        is_dead = [not worker.lives(instance_id) for worker, instance_id in self._lost]
        if (
            sum(is_dead[self._num_with_progress :]) < MAX_WITHOUT_PROGRESS
            and sum(is_dead) < MAX_LOST
        ):
            self._suspected_at = None
            return False
        now = time.monotonic()
        if self._suspected_at is None:
            self._suspected_at = now
        if now - self._suspected_at < VERDICT_S:
            return True
        self._failover.num_poisonous += 1
        raise PoisonRequest(
            "The workers that ran this request were lost, one after the other. It is not sent to "
            "another."
        )


@dataclass(slots=True)
class Refused:
    """Refusal by a worker whose queue was full."""

    num_bytes: int
    """Bytes of the smallest body that was refused."""
    until: float
    num_finished: int
    """Number of this gateway's sequences that had ended at the worker at the time of the
    refusal."""
    pace_s: float
    next_room_at: float
    """Time at which the last refused client was told to retry. The next client is told a later
    time."""

    def holds(self, worker: WorkerClient, now: float, num_bytes: int) -> bool:
        """Returns whether the refusal applies to a request of `num_bytes`."""
        is_as_full = worker.num_finished == self.num_finished or self.num_bytes > LARGE
        return now < self.until and is_as_full and num_bytes >= self.num_bytes


class FullQueues:
    """Recent refusals by workers whose queues were full, as reported to one gateway. Similar
    requests are refused before their prompts are tokenised, so that an overload costs little.

    A worker that refuses a request reports how long it takes until one place in its queue becomes
    free for the tenant. During that time the gateway sends the worker no similar requests, unless
    one of the gateway's requests has ended there, or the new request is smaller than the refused
    one and so may find room. A large request needs many places, and refusing it costs the worker as
    much as refusing many small ones. Therefore the refusal of a large request applies for longer.
    """

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
