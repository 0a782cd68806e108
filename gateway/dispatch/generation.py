"""Runs the sequences of one request on workers. Sends them, merges their outputs, moves them when a
worker is lost, and cancels them together."""

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

from gateway.dispatch.choice import Choice, Delta
from gateway.dispatch.failover import Failover, RetryState
from gateway.dispatch.prompt_usage import PromptUsage
from gateway.exceptions import DeadlineExceeded
from gateway.limits.admission import Reservation, Usage
from workers.wire.client import SequenceEvent, Silence, WorkerClient, WorkerFailed
from workers.wire.protocol import (
    AdapterRef,
    ErrorCode,
    FinishReason,
    Generate,
    OutputKind,
    PromptProgress,
    SamplingParams,
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
NEVER_BEGUN = (
    *(ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN, ErrorCode.MODEL_UNAVAILABLE),
    *(ErrorCode.ADAPTER_UNAVAILABLE, ErrorCode.PROMPT_TOO_LONG),
    *(ErrorCode.OVERLOADED, ErrorCode.EXPIRED),
)
"""Failures before which no worker has computed anything. `INVALID` is excluded, because workers
also report it for answers that they computed but cannot send."""
MAX_MOVES = 16
"""Maximum number of moves of one request that are recorded for its trace."""


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
    """Usage of the prompt, shared by all choices of the prompt."""
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
    """None until the first failure."""
    followers: list[int] = field(default_factory=list[int])
    """Indexes of the other choices of the same prompt, if this sequence also scores the prompt.
    They are sent once these scores have arrived, and find the prompt in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Scores of the prompt that a follower shows with its first output."""

    @property
    def has_progressed(self) -> bool:
        """Whether the sequence has new tokens since it was sent last."""
        return len(self.tokens) > self.request.num_resumed


class Generation:
    """Generation of one request's answers. Await `step` until `is_done`, or await `finish`. Then
    call `cancel`."""

    def __init__(
        self,
        worker: WorkerClient,
        requests: Sequence[Generate],
        choices: Sequence[Choice],
        reservation: Reservation,
        failover: Failover,
        *,
        num_choices: int,
        adapter_for: Callable[[str], AdapterRef | None],
        deadline: float,
        num_bytes: int,
    ) -> None:
        """`requests[i]` is the sequence of `choices[i]`. The first `step` sends it. Each prompt has
        `num_choices` consecutive choices. If the first of them scores the prompt, the others show
        the same scores. Tokens that `reservation` does not cover are dropped, and the answer ends
        with finish reason `length`. `adapter_for` returns the adapter for a worker's layout.
        `deadline` is the time of time.perf_counter() by which the first output is due. `num_bytes`
        is the size of the request's body."""
        self.worker_id = worker.instance_id
        """Instance id of the worker to which a sequence was last sent."""
        self.first_output_at: float | None = None
        """Time of time.perf_counter() at which the first output arrived. None before that."""
        self.ended_at: float | None = None
        """Time of time.perf_counter() at which the last choice ended."""
        self.moves: list[Move] = []
        """The first `MAX_MOVES` moves."""
        self.worker_times: WorkerTimes | None = None
        """Stage times of the sequence that reported last. None if the request is not traced."""
        self._reservation = reservation
        self._failover = failover
        self._adapter_for = adapter_for
        self._deadline = deadline
        self._num_bytes = num_bytes
        self._prompts = [PromptUsage(len(each.prompt)) for each in choices[::num_choices]]
        self._runs = [
            RemoteSequence(
                request, choice, self._prompts[i // num_choices], worker, worker.instance_id
            )
            for i, (request, choice) in enumerate(zip(requests, choices, strict=True))
        ]
        for first in range(0, len(choices), num_choices):
            if requests[first].params.prompt_logprobs is not None:
                self._runs[first].followers = list(range(first + 1, first + num_choices))
        self._choices = choices
        self._num_running = len(choices)
        self._is_submitted = False
        self._num_begun = 0
        """Number of sequences that were sent, or wait for another choice to score their prompt."""
        self._is_sent = False
        """Whether any sequence has been sent to a worker."""
        self._expiry: asyncio.TimerHandle | None = None
        self._stranded: set[int] = set()
        """Indexes of the sequences that wait for a worker."""
        self._search: asyncio.Task[None] | None = None
        """Task that searches workers for stranded sequences."""
        self._deltas: list[Delta] = []
        self._failure: Exception | None = None
        """Exception that `step` raises after it has returned the deltas before it."""
        self._news = asyncio.Event()
        self._is_patient = False
        """Whether the task is woken only when every choice has ended or one has failed."""
        self._is_cancelled = False
        self._aborted: set[int] = set()
        """Indexes of the aborted sequences whose workers have not reported their end yet."""
        self._no_more = asyncio.Event()
        """Set when the ends of all aborted sequences have been reported."""

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the first choice. Other choices may differ in `max_tokens`,
        `min_tokens`, `choice` and `prompt_logprobs` and, if the request sets no seed, in `seed`."""
        return self._runs[0].request.params

    @property
    def finish_reasons(self) -> list[str | None]:
        """Finish reason of each choice. None for a choice that did not finish. Empty for a request
        for vectors."""
        if self._runs[0].request.kind is OutputKind.EMBED:
            return []
        return [run.choice.finish_reason for run in self._runs]

    @property
    def is_refused(self) -> bool:
        """Whether nothing was used, because no sequence was sent to a worker, or the request failed
        before a worker computed any of its prompts."""
        failure = self._failure
        if isinstance(failure, WorkerFailed) and failure.code in NEVER_BEGUN:
            return not any(prompt.num_reached for prompt in self._prompts)
        return not self._is_sent

    @property
    def usage(self) -> Usage:
        """Usage so far, as reported by workers."""
        return Usage(
            prompt_tokens=sum([prompt.num_reached for prompt in self._prompts]),
            completion_tokens=sum([choice.num_tokens for choice in self._choices]),
            cached_tokens=sum([prompt.num_cached for prompt in self._prompts]),
            thought_tokens=sum([choice.num_thought_tokens for choice in self._choices]),
        )

    async def step(self) -> list[Delta]:
        """Waits for outputs, and returns the deltas of all outputs that have arrived. Raises
        WorkerFailed, DeadlineExceeded, PoisonRequest, or the exception given to `fail`."""
        if not self._is_submitted and self._failure is None:
            self._submit()
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            if not self._deltas:
                raise self._failure
            self._news.set()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def finish(self) -> list[Delta]:
        """Waits for all choices to end and returns their deltas. Raises the errors of `step`."""
        self._is_patient = True
        deltas: list[Delta] = []
        while not self.is_done:
            deltas += await self.step()
        return deltas

    def fail(self, failure: Exception) -> None:
        """Aborts running sequences. `step` then raises `failure`, after it has returned the deltas
        that arrived before."""
        self._fail(failure)
        self._abort()

    def cancel(self) -> None:
        """Aborts running sequences without waiting for reports. May be called repeatedly."""
        self._abort()
        for number in self._aborted:
            run = self._runs[number]
            run.worker.cancel(run.id)
        self._aborted.clear()

    async def stop(self, timeout_s: float) -> bool:
        """Aborts running sequences, and waits until their workers have reported how much of the
        prompts they computed. Returns False if they have not within `timeout_s`. `usage` may still
        grow then."""
        self._abort()
        if self._aborted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._no_more.wait()
        return not self._aborted

    def _abort(self) -> None:
        if self._is_cancelled:
            return
        self._is_cancelled = True
        self._stop_expiry()
        if self._search is not None:
            self._search.cancel()
            self._search = None
        for number, run in enumerate(self._runs):
            if run.prompt.is_whole:
                run.worker.cancel(run.id)
            elif run.worker.abort(run.id):
                self._aborted.add(number)

    def _submit(self) -> None:
        self._is_submitted = True
        self._failover.budget.note_sent(len(self._runs))
        left_s = self._deadline - time.perf_counter()
        self._expiry = asyncio.get_running_loop().call_later(left_s + GRACE_S, self._expire)
        waiting = {number for run in self._runs for number in run.followers}
        for number in range(min(len(self._runs), MAX_AT_ONCE)):
            self._num_begun += 1
            if number not in waiting:
                self._begin(number)

    def _begin(self, number: int) -> None:
        run = self._runs[number]
        try:
            self._send(number, run.worker)
        except WorkerFailed as failure:
            if failure.code is not ErrorCode.WORKER_LOST:
                raise
            # The worker was lost before it received the sequence.
            self._retries(run).exclude(run.worker)
            self._place(number)

    def _send(self, number: int, worker: WorkerClient) -> None:
        run = self._runs[number]
        sent_at = time.perf_counter()
        run.id = worker.send(run.request, partial(self._take, number))
        run.sent_at = sent_at
        self._is_sent = True
        run.worker = worker
        run.worker_id = self.worker_id = worker.instance_id

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("No answer began within the time that this request had."))

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._news.set()

    def _take(self, number: int, event: SequenceEvent) -> None:
        """Handles an event as soon as it is read from the worker's connection. Wakes the request's
        task, unless the task waits in `finish` for a later event."""
        run = self._runs[number]
        if isinstance(event, PromptProgress) or (
            isinstance(event, SequenceOutput) and event.finish_reason is not FinishReason.ABORT
        ):
            run.prompt.note(event)
        if self._failure is not None or self._is_cancelled:
            self._note_end(number, event)
            return
        try:
            if isinstance(event, SequenceOutput):
                self._feed(number, event)
            elif isinstance(event, WorkerFailed):
                self._failover.full.note(run.worker, run.request, self._num_bytes, event)
                self._move(number, event)
            elif isinstance(event, Silence):
                self._leave(number)
            else:
                return
        except Exception as error:
            self._failure = error
        if not self._is_patient or self.is_done or self._failure is not None:
            self._news.set()

    def _note_end(self, number: int, event: SequenceEvent) -> None:
        """Records a sequence's end after the request has ended. `stop` may be waiting for it."""
        if isinstance(event, WorkerFailed) or (
            isinstance(event, SequenceOutput) and event.finish_reason is not None
        ):
            self._note_times(self._runs[number], event)
            self._aborted.discard(number)
            if self._is_cancelled and not self._aborted:
                self._no_more.set()

    def _feed(self, number: int, output: SequenceOutput) -> None:
        if self.first_output_at is None:
            self.first_output_at = time.perf_counter()
            self._stop_expiry()
        run = self._runs[number]
        choice = run.choice
        if choice.finish_reason is not None:
            return
        if output.times is not None:
            self._note_times(run, output)
        run.tokens += output.tokens
        if run.prompt_logprobs is not None:
            output = msgspec.structs.replace(output, prompt_logprobs=run.prompt_logprobs)
            run.prompt_logprobs = None
        self._deltas.append(choice.feed(self._covered(output)))
        if choice.finish_reason is not None:
            self._num_running -= 1
            self.ended_at = time.perf_counter()
            if output.finish_reason is None:
                run.worker.cancel(run.id)
            self._begin_next()
        if run.followers:
            self._begin_followers(run, output)

    def _begin_next(self) -> None:
        """Begins the next sequence beyond `MAX_AT_ONCE`, after another one has ended."""
        if self._num_begun == len(self._runs):
            return
        number = self._num_begun
        self._num_begun += 1
        run = self._runs[number]
        # The answer has begun, so that the deadline of the first output no longer applies.
        run.request = msgspec.structs.replace(run.request, timeout_s=None)
        self._begin(number)

    def _begin_followers(self, first: RemoteSequence, output: SequenceOutput) -> None:
        """Begins the followers of a prompt's first choice. `output` is the first output of that
        choice, and has the prompt's scores. If the request only scores prompts, all choices get
        this output."""
        followers, first.followers = first.followers, []
        for number in followers:
            run = self._runs[number]
            if run.request.kind is OutputKind.SCORE:
                self._feed(number, output)
                continue
            run.prompt_logprobs = output.prompt_logprobs
            run.request = self._rewritten(run, first.worker)
            run.worker = first.worker
            self._begin(number)

    def _note_times(self, run: RemoteSequence, event: SequenceOutput | WorkerFailed) -> None:
        if event.times is not None:
            is_last = isinstance(event, WorkerFailed) or event.finish_reason is not None
            self.worker_times = WorkerTimes(run.worker_id, run.sent_at, event.times, is_last)

    def _covered(self, output: SequenceOutput) -> SequenceOutput:
        num_covered = self._reservation.give(len(output.tokens))
        if num_covered == len(output.tokens):
            return output
        return msgspec.structs.replace(
            output,
            tokens=output.tokens[:num_covered],
            logprobs=output.logprobs and output.logprobs[:num_covered],
            finish_reason=FinishReason.LENGTH,
            stop_token=None,
        )

    def _leave(self, number: int) -> None:
        """Moves the sequence off a silent worker, unless no other worker can take it."""
        run = self._runs[number]
        if not run.tokens and not self._failover.budget.has_room:
            return
        if self._failover.has_other(run.request.model, run.worker):
            run.worker.cancel(run.id)
            self._move(number, WorkerFailed(ErrorCode.WORKER_LOST, "the worker does not answer"))

    def _move(self, number: int, failure: WorkerFailed) -> None:
        """Moves a failed sequence to another worker. Raises the sequence's error if it may not
        move."""
        run = self._runs[number]
        if run.choice.finish_reason is not None:
            return
        self._note_times(run, failure)
        case = self._retries(run)
        if run.has_progressed:
            case.note_progress()
        case.add(
            *(failure, run.worker, run.worker_id),
            is_begun=bool(run.tokens),
            is_answering=self.first_output_at is not None,
        )
        self._place(number)

    def _retries(self, run: RemoteSequence) -> RetryState:
        if run.retry_state is None:
            run.retry_state = RetryState(self._failover)
        return run.retry_state

    def _place(self, number: int) -> None:
        """Sends the sequence to another worker, or queues it until one is found. Raises the
        sequence's error if it may not wait."""
        if self._is_placed(number):
            return
        self._stranded.add(number)
        if self._search is None:
            self._search = asyncio.create_task(self._look_for_workers())

    def _is_placed(self, number: int) -> bool:
        run = self._runs[number]
        case = self._retries(run)
        if case.is_suspected():
            return False
        find, num_bytes = self._failover.find, self._num_bytes
        while (worker := find(run.request, case.excluded, num_bytes)) is not None:
            run.request = self._rewritten(run, worker)
            left = run.worker_id
            try:
                self._send(number, worker)
            except WorkerFailed as failure:
                if failure.code is not ErrorCode.WORKER_LOST:
                    raise
                case.exclude(worker)
                continue
            self._failover.note_move(run.request)
            if len(self.moves) < MAX_MOVES:
                self.moves.append(
                    Move(run.sent_at, left, run.worker_id, case.reason, len(run.tokens))
                )
            log.info("%s moved to worker %s", run.request.request_id, run.worker_id)
            return True
        if case.gives_up():
            raise case.failure
        return False

    def _rewritten(self, run: RemoteSequence, worker: WorkerClient) -> Generate:
        """Returns the request that continues the sequence on this worker, after the tokens
        generated so far."""
        request, params = run.request, run.request.params
        adapter = request.adapter and self._adapter_for(worker.models[request.model].adapter_layout)
        now = time.perf_counter()
        waited_s = request.waited_s + (now - run.sent_at if run.sent_at else 0.0)
        is_answering = self.first_output_at is not None
        if run.tokens and params.prompt_logprobs is not None:
            # The prompt's scores arrived with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            params=params,
            adapter=adapter,
            tokens=[*run.choice.prompt, *run.tokens],
            num_resumed=len(run.tokens),
            timeout_s=None if is_answering else self._deadline - now,
            waited_s=0.0 if is_answering else waited_s,
        )

    async def _look_for_workers(self) -> None:
        try:
            while self._stranded:
                await asyncio.sleep(SEARCH_INTERVAL_S)
                self._stranded -= {each for each in self._stranded if self._is_placed(each)}
        except Exception as failure:
            self._fail(failure)
        self._search = None
