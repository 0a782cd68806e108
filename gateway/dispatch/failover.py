"""What becomes of a sequence whose worker cannot have it: another worker, a wait for one, or the
end.

    refused     (draining, the model is not there) it goes to another, or waits for one
    overloaded  it goes once to another that has not just refused such a request; where the answer
                has begun, if with another choice, it waits too, and does not expire
    lost        before its first token it is retried within the budget, after it resumed; without
                another worker it waits
    lost again  without a token in between: it waits for them, and if they were not merely cut off,
                it is taken for the cause
"""

from __future__ import annotations

import time
from collections.abc import Collection

from gateway.dispatch.fleet import Fleet
from gateway.dispatch.retry_budget import RetryBudget
from gateway.dispatch.routing import Work
from gateway.dispatch.shedding import FullQueues
from gateway.exceptions import NoWorker, PoisonRequest
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.prefix_index import Prefix
from workers.wire.protocol import ErrorCode, Generate, version_needed

EXCLUDED_S = 1.0
"""How long a sequence stays away from a worker that refused it; by then its status tells."""
MAX_WITHOUT_PROGRESS = 2
"""Workers lost in a row without a token in between after which the sequence is refused."""
MAX_LOST = 5
"""Workers lost in all after which it is refused."""
VERDICT_S = 3.0
"""How long workers that were merely cut off have to come back before a sequence is taken for the
cause of their loss."""
REFUSALS = (ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN)
OVERLOADED = (ErrorCode.OVERLOADED, ErrorCode.MODEL_UNAVAILABLE)


class Failover:
    """Where else a gateway's sequences can go, and how many may."""

    def __init__(self, fleet: Fleet, wait_s: float) -> None:
        """wait_s: how long a sequence waits for a worker when there is none."""
        self.budget = RetryBudget()
        self.wait_s = wait_s
        self.full = FullQueues()
        self.num_retried = 0
        """Sequences sent to another worker before their first token."""
        self.num_resumed = 0
        """Sequences that went on elsewhere after their first token."""
        self.num_poisonous = 0
        self._fleet = fleet

    def find(
        self, request: Generate, excluded: Collection[WorkerClient], num_bytes: int
    ) -> WorkerClient | None:
        """Returns a worker that is not silent and counts the sequence there, or None. A worker that
        has just refused such a request for want of room is left out. num_bytes: of its body."""
        if not request.num_resumed:
            excluded = [*excluded, *self.full.full(self._fleet.clients, request, num_bytes)]
        work = _work_of(request)
        try:
            worker = self._fleet.choose(work, excluded)
        except NoWorker:
            return None
        if worker.is_silent:
            return None
        self._fleet.note_sent(worker, work)
        return worker

    def has_other(self, model: str, worker: WorkerClient) -> bool:
        """Whether another worker that is heard of has the base model of this digest."""
        return any(w is not worker and not w.is_silent for w in self._fleet.serving(model))

    def note_move(self, request: Generate) -> None:
        if request.num_resumed:
            self.num_resumed += 1
        else:
            self.num_retried += 1


class RetryState:
    """One sequence's failures so far, and what may still be done for it."""

    def __init__(self, failover: Failover) -> None:
        self.failure: Exception = NoWorker("No worker is ready for this model. Try again shortly.")
        """What it ends with when nothing helps."""
        self._failover = failover
        self._is_patient = True
        """It may wait for a worker."""
        self._lost: list[tuple[WorkerClient, str]] = []
        """Workers, with their instance ids."""
        self._num_with_progress = 0
        """How many of them were lost before its last token."""
        self._suspected_at: float | None = None
        self._was_overloaded = False
        self._excluded: dict[WorkerClient, float] = {}
        """Until when."""
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
        """Whether it has waited in vain for as long as it may; the wait begins with this."""
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
        """Raises what the sequence ends with if no other worker may have it. `instance_id` is the
        worker's when it got the sequence; `is_begun`: tokens have come, from whomever;
        `is_answering`: of any choice of its request."""
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
        """Whether it may be what its workers were lost of, so that no other is to have it yet.
        Raises PoisonRequest if it is taken for that.

        A worker that is known to live by now was cut off, and not by what it was sent.
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


def _work_of(request: Generate) -> Work:
    adapter = None if request.adapter is None else request.adapter.digest
    prefix = Prefix(
        request.tokens,
        model=request.model,
        domain=request.cache_domain,
        adapter=adapter,
        activation=request.activation,
        salt=request.cache_salt,
    )
    params = request.params
    least_version = version_needed(params.logprobs, params.logprob_token_ids)
    return Work(request.model, adapter, [prefix], 1, least_version)
