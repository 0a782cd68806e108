"""Places the sequences of one request on workers. Sends them, moves a sequence whose worker refused
or lost it, and aborts them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from gateway.dispatch.choice import Choice
from gateway.dispatch.failover import Failover, RetryState
from gateway.dispatch.run import Run
from gateway.exceptions import DeadlineExceeded
from workers.wire.client import SequenceEvent, WorkerClient, WorkerFailed
from workers.wire.protocol import (
    ErrorCode,
    Generate,
    PromptProgress,
    SequenceOutput,
    SequenceTimes,
    TokenLogprobs,
)

log = logging.getLogger(__name__)

SEARCH_INTERVAL_S = 0.1
"""Seconds between attempts to find a worker for a stranded sequence."""
GRACE_S = 0.5
"""Seconds after the deadline during which the gateway still waits for a worker's report. If the
report says that the sequence never began, its prompt is not billed."""
MAX_AT_ONCE = 128
"""Maximum number of sequences of one request that are at workers at a time. Only requests for
vectors have more. Sending all of them at once would fill a worker's queue without making its steps
more efficient."""
MAX_MOVES = 16
"""Maximum number of moves of one request that are recorded for its trace."""


class PromptUsage:
    """Counter of the positions of a prompt, each counted once.

    Every sequence computes a prompt from its start, so the positions that any of them has reached
    are the first `num_reached`. If another sequence computes such a position again, or the same
    sequence does after a preemption or a move, the position is not counted again.

        choice 0, first worker   [cached | computed ...]          then the worker is lost
        choice 0, second worker  [computed .................. | computed]
        counted as                cached | computed           | computed
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_reached = 0
        """Number of positions that were computed or found in a prefix cache."""
        self.num_cached = 0
        """Number of positions that were in the prefix cache before this request."""
        self._num_tokens = num_tokens

    @property
    def is_whole(self) -> bool:
        return self.num_reached == self._num_tokens

    def note(self, event: SequenceOutput | PromptProgress) -> None:
        """Counts the positions that a worker reports for one of the prompt's sequences. A sequence
        with an output has computed its whole prompt."""
        if isinstance(event, PromptProgress):
            num_positions, num_cached = event.num_positions, event.num_cached
        else:
            num_positions, num_cached = self._num_tokens, event.num_cached_tokens
        if num_positions > self.num_reached:
            self.num_cached += max(min(num_cached, num_positions) - self.num_reached, 0)
            self.num_reached = num_positions


class Move(NamedTuple):
    """Move of a sequence to another worker, after its worker refused it or was lost."""

    at: float
    """Time of time.perf_counter() at which the sequence was sent to the new worker."""
    from_worker: str
    to_worker: str
    reason: str
    """Error code of the failure that caused the move."""
    num_resumed: int
    """Number of tokens that the sequence had generated before the move."""


class WorkerTimes(NamedTuple):
    """Times of one sequence's stages, as reported by a worker."""

    worker_id: str
    sent_at: float
    """Time of time.perf_counter() at which the sequence was sent."""
    times: SequenceTimes
    is_last: bool
    """Whether the times were reported with the end of the sequence."""


@dataclass(slots=True)
class RemoteSequence:
    """Sequence with its current worker and its state."""

    request: Generate
    """Request as it was sent last."""
    choice: Choice
    prompt: PromptUsage
    """Usage of the prompt, which all choices of the prompt share."""
    worker: WorkerClient
    worker_id: str
    """Instance id of the worker when the sequence was sent."""
    id: int = 0
    """Id of the sequence in the worker's client."""
    sent_at: float = 0.0
    """Time of time.perf_counter() at which the sequence was sent last."""
    tokens: list[int] = field(default_factory=list[int])
    """Tokens generated so far by all its workers."""
    retry_state: RetryState | None = None
    """Failures of the sequence so far. None until the first failure."""
    followers: list[int] = field(default_factory=list[int])
    """Indexes of the other choices of the same prompt, if this sequence also scores the prompt.
    They are sent once these scores have arrived, and find the prompt in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Prompt scores from the first choice, which this sequence shows with its first output."""


class Placement:
    """Assignment of one request's sequences to workers. Also holds the sequences that wait for a
    worker."""

    def __init__(
        self,
        run: Run,
        sequences: Sequence[RemoteSequence],
        failover: Failover,
        on_event: Callable[[int, SequenceEvent], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`on_event` is called with the index of a sequence and each of its events, as soon as the
        event is read from the worker's connection. `on_failure` is called with the error that ends
        the request if the deadline passes or no worker is found in time."""
        self.sequences = sequences
        self.worker_id = sequences[0].worker_id
        """Instance id of the worker to which a sequence was last sent."""
        self.moves: list[Move] = []
        """First `MAX_MOVES` moves of the request's sequences."""
        self.worker_times: WorkerTimes | None = None
        """Stage times of the sequence that reported last. None if the request is not traced."""
        self.is_sent = False
        """Whether any sequence has been sent to a worker."""
        self.is_ended = False
        """Whether `abort` was called."""
        self._run = run
        self._failover = failover
        self._on_event = on_event
        self._on_failure = on_failure
        self._is_answering = False
        self._num_begun = 0
        """Number of sequences that were sent, or wait for another choice to score their prompt."""
        self._expiry: asyncio.TimerHandle | None = None
        self._stranded: set[int] = set()
        """Indexes of the sequences that wait for a worker."""
        self._search: asyncio.Task[None] | None = None
        self._aborted: set[int] = set()
        """Indexes of the aborted sequences whose workers have not reported their end yet."""
        self._no_more = asyncio.Event()
        """Set when the ends of all aborted sequences have been reported."""

    def submit(self) -> None:
        """Sends the first sequences, and begins to wait for the first output."""
        self._failover.budget.note_sent(len(self.sequences))
        left_s = self._run.deadline - time.perf_counter()
        self._expiry = asyncio.get_running_loop().call_later(left_s + GRACE_S, self._expire)
        waiting = {number for sequence in self.sequences for number in sequence.followers}
        for number in range(min(len(self.sequences), MAX_AT_ONCE)):
            self._num_begun += 1
            if number not in waiting:
                self._begin(number)

    def note_answering(self) -> None:
        """Records that the answer has begun, so that the deadline of the first output no longer
        applies."""
        self._is_answering = True
        self._stop_expiry()

    def begin_next(self) -> None:
        """Begins the next sequence beyond `MAX_AT_ONCE`, after another one has ended."""
        if self._num_begun == len(self.sequences):
            return
        number = self._num_begun
        self._num_begun += 1
        sequence = self.sequences[number]
        sequence.request = msgspec.structs.replace(sequence.request, timeout_s=None)
        self._begin(number)

    def begin_follower(
        self, number: int, worker: WorkerClient, prompt_logprobs: list[TokenLogprobs] | None
    ) -> None:
        """Begins a sequence whose prompt another choice has scored on this worker."""
        sequence = self.sequences[number]
        sequence.prompt_logprobs = prompt_logprobs
        sequence.request = self._rewritten(sequence, worker)
        sequence.worker = worker
        self._begin(number)

    def leave(self, number: int, failure: WorkerFailed) -> None:
        """Moves a sequence whose worker refused it or was lost. Raises the sequence's error if it
        may not move."""
        sequence = self.sequences[number]
        self._failover.full.note(sequence.worker, sequence.request, self._run.num_bytes, failure)
        self._move(number, failure)

    def leave_silent(self, number: int) -> None:
        """Moves the sequence off a silent worker, unless no other worker can take it."""
        sequence = self.sequences[number]
        if not sequence.tokens and not self._failover.budget.has_room:
            return
        if self._failover.has_other(sequence.request.model, sequence.worker):
            sequence.worker.cancel(sequence.id)
            self._move(number, WorkerFailed(ErrorCode.WORKER_LOST, "the worker does not answer"))

    def note_times(self, sequence: RemoteSequence, event: SequenceOutput | WorkerFailed) -> None:
        if event.times is not None:
            is_last = isinstance(event, WorkerFailed) or event.finish_reason is not None
            worker_id, sent_at = sequence.worker_id, sequence.sent_at
            self.worker_times = WorkerTimes(worker_id, sent_at, event.times, is_last)

    def note_end(self, number: int, event: SequenceEvent) -> None:
        """Records a sequence's end after the request has ended. `stop` may be waiting for it."""
        if isinstance(event, WorkerFailed) or (
            isinstance(event, SequenceOutput) and event.finish_reason is not None
        ):
            self.note_times(self.sequences[number], event)
            self._aborted.discard(number)
            if self.is_ended and not self._aborted:
                self._no_more.set()

    def abort(self) -> None:
        """Aborts running sequences. May be called repeatedly."""
        if self.is_ended:
            return
        self.is_ended = True
        self._stop_expiry()
        if self._search is not None:
            self._search.cancel()
            self._search = None
        for number, sequence in enumerate(self.sequences):
            if sequence.prompt.is_whole:
                sequence.worker.cancel(sequence.id)
            elif sequence.worker.abort(sequence.id):
                self._aborted.add(number)

    def cancel(self) -> None:
        """Aborts running sequences without waiting for reports. May be called repeatedly."""
        self.abort()
        for sequence in [self.sequences[number] for number in self._aborted]:
            sequence.worker.cancel(sequence.id)
        self._aborted.clear()
        # Both callbacks refer to this placement's owner, which refers to the placement. Otherwise,
        # this cycle would stay in memory until the garbage collector runs.
        self._on_event = self._on_failure = _ignore

    async def stop(self, timeout_s: float) -> bool:
        """Aborts running sequences, and waits until their workers have reported how much of the
        prompts they computed. Returns False if a report is missing after `timeout_s` seconds."""
        self.abort()
        if self._aborted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._no_more.wait()
        return not self._aborted

    def _begin(self, number: int) -> None:
        sequence = self.sequences[number]
        try:
            self._send(number, sequence.worker)
        except WorkerFailed as failure:
            if failure.code is not ErrorCode.WORKER_LOST:
                raise
            # The worker was lost before it received the sequence.
            self._retries(sequence).exclude(sequence.worker)
            self._place(number)

    def _send(self, number: int, worker: WorkerClient) -> None:
        sequence = self.sequences[number]
        sent_at = time.perf_counter()
        sequence.id = worker.send(sequence.request, partial(self._on_event, number))
        sequence.sent_at = sent_at
        self.is_sent = True
        sequence.worker = worker
        sequence.worker_id = self.worker_id = worker.instance_id

    def _expire(self) -> None:
        self._on_failure(DeadlineExceeded("No answer began within the time that this request had."))

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _move(self, number: int, failure: WorkerFailed) -> None:
        sequence = self.sequences[number]
        if sequence.choice.finish_reason is not None:
            return
        self.note_times(sequence, failure)
        case = self._retries(sequence)
        if len(sequence.tokens) > sequence.request.num_resumed:
            case.note_progress()
        case.add(
            *(failure, sequence.worker, sequence.worker_id),
            is_begun=bool(sequence.tokens),
            is_answering=self._is_answering,
        )
        self._place(number)

    def _retries(self, sequence: RemoteSequence) -> RetryState:
        if sequence.retry_state is None:
            sequence.retry_state = RetryState(self._failover)
        return sequence.retry_state

    def _place(self, number: int) -> None:
        """Sends the sequence to another worker, or queues it until one is found. Raises the
        sequence's error if it may not wait."""
        if self._is_placed(number):
            return
        self._stranded.add(number)
        if self._search is None:
            self._search = asyncio.create_task(self._look_for_workers())

    def _is_placed(self, number: int) -> bool:
        sequence = self.sequences[number]
        case = self._retries(sequence)
        if case.is_suspected():
            return False
        find, num_bytes = self._failover.find, self._run.num_bytes
        while (worker := find(sequence.request, case.excluded, num_bytes)) is not None:
            sequence.request = self._rewritten(sequence, worker)
            left = sequence.worker_id
            try:
                self._send(number, worker)
            except WorkerFailed as failure:
                if failure.code is not ErrorCode.WORKER_LOST:
                    raise
                case.exclude(worker)
                continue
            self._failover.note_move(sequence.request)
            if len(self.moves) < MAX_MOVES:
                to, num_resumed = sequence.worker_id, len(sequence.tokens)
                self.moves.append(Move(sequence.sent_at, left, to, case.reason, num_resumed))
            log.info("%s moved to worker %s", sequence.request.request_id, sequence.worker_id)
            return True
        if case.gives_up():
            raise case.failure
        return False

    def _rewritten(self, sequence: RemoteSequence, worker: WorkerClient) -> Generate:
        """Returns the request that continues the sequence on this worker, after the tokens
        generated so far."""
        request, params = sequence.request, sequence.request.params
        adapter = request.adapter and self._run.target.adapter_for(
            worker.models[request.model].adapter_layout
        )
        now = time.perf_counter()
        waited_s = request.waited_s + (now - sequence.sent_at if sequence.sent_at else 0.0)
        if sequence.tokens and params.prompt_logprobs is not None:
            # The prompt is not scored again, because its scores arrived with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            params=params,
            adapter=adapter,
            tokens=[*sequence.choice.prompt, *sequence.tokens],
            num_resumed=len(sequence.tokens),
            timeout_s=None if self._is_answering else self._run.deadline - now,
            waited_s=0.0 if self._is_answering else waited_s,
        )

    async def _look_for_workers(self) -> None:
        try:
            while self._stranded:
                await asyncio.sleep(SEARCH_INTERVAL_S)
                self._stranded -= {each for each in self._stranded if self._is_placed(each)}
        except Exception as failure:
            self._on_failure(failure)
        self._search = None


def _ignore(*_: object) -> None:
    pass
