"""Decides what happens to a sequence that its worker refused or lost: it moves, waits or ends.

refused     The worker is draining or does not have the model. The sequence moves to another worker,
            or waits for one.
overloaded  The sequence moves once, to a worker that has not just refused a similar request. If any
            choice has begun, it may move again, wait for a worker, and outlast its deadline.
lost        Before its first token, the sequence is retried on another worker, within the budget of
            retries. After its first token, it continues on another worker. If there is no other
            worker, it waits for one.
lost again  Two workers were lost without a token in between. The sequence waits for their processes
            to connect again. If they do not, it is presumed to have crashed them, and ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

from gateway.dispatch.fleet import Fleet
from gateway.dispatch.shedding import FullQueues
from gateway.dispatch.standings import Work
from gateway.exceptions import NoWorker, PoisonRequest
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import ErrorCode, Generate

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
