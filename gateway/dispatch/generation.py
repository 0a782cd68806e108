"""The sequences of one request on their workers: sent, merged, moved when a worker is lost, and
cancelled together."""

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
"""How often it is looked for a worker where there was none."""
GRACE_S = 0.5
"""How long after the deadline a worker may say that it has not begun, which costs nothing."""
MAX_AT_ONCE = 128
"""Sequences of one request that workers have at a time. Only vectors are asked for in larger
numbers: a worker's queue would refuse them, and nothing is gained by more than fill its steps."""
NEVER_BEGUN = (
    *(ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN, ErrorCode.MODEL_UNAVAILABLE),
    *(ErrorCode.ADAPTER_UNAVAILABLE, ErrorCode.PROMPT_TOO_LONG),
    *(ErrorCode.OVERLOADED, ErrorCode.EXPIRED),
)
"""Not `invalid`: so a worker calls an answer, too, that it has computed and cannot send."""
MAX_MOVES = 16
"""Moves of one request that are remembered."""


class Move(NamedTuple):
    """A sequence that one worker could not have or has lost goes to another."""

    at: float
    """In seconds of time.perf_counter()."""
    from_worker: str
    to_worker: str
    reason: str
    """Code of the failure."""
    num_resumed: int
    """Tokens that it had by then."""


class WorkerTimes(NamedTuple):
    """What a worker has told of one sequence's time there."""

    worker_id: str
    sent_at: float
    """When the sequence was sent there, of time.perf_counter()."""
    times: SequenceTimes
    is_last: bool
    """Told with the end of the sequence."""


@dataclass(slots=True)
class RemoteSequence:
    """One sequence on one worker, and what it has come to."""

    request: Generate
    """As it was sent last."""
    choice: Choice
    prompt: PromptUsage
    """Shared by the choices of a prompt."""
    worker: WorkerClient
    worker_id: str
    """The worker's instance when it was sent."""
    id: int = 0
    """At the worker's client."""
    sent_at: float = 0.0
    """In seconds of time.perf_counter()."""
    tokens: list[int] = field(default_factory=list[int])
    """Generated so far, by all its workers."""
    retry_state: RetryState | None = None
    """From its first failure on."""
    followers: list[int] = field(default_factory=list[int])
    """The other choices of a prompt that this one scores, by number, until its scores have come:
    then they are sent, and find the prompt computed."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The scores of a follower, until its first output is there to show them with."""

    @property
    def has_progressed(self) -> bool:
        """Since it was sent last."""
        return len(self.tokens) > self.request.num_resumed


class Generation:
    """Await `step` until `is_done`, or `finish`; then or before that `cancel`."""

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
        """`requests[i]` is the sequence of `choices[i]`; sent with the first `step`. Each prompt
        has `num_choices`, one after the other. If the first scores its prompt, the others show its
        scores. What the reservation does not cover is not given: the answer ends for its length.
        `adapter_for` gives the adapter as a worker of a layout must have it. `deadline`: of the
        first output, of time.perf_counter(). `num_bytes`: how large the request came."""
        self.worker_id = worker.instance_id
        """The worker that got a sequence last."""
        self.first_output_at: float | None = None
        """In seconds of time.perf_counter()."""
        self.ended_at: float | None = None
        """The same of the last choice that has ended."""
        self.moves: list[Move] = []
        """The first `MAX_MOVES`."""
        self.worker_times: WorkerTimes | None = None
        """Stage times of the sequence that told last, if the request is traced."""
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
        """Sequences that were sent, or are sent with a follower's scores."""
        self._is_sent = False
        """To a worker, any of it."""
        self._expiry: asyncio.TimerHandle | None = None
        self._stranded: set[int] = set()
        """Sequences that wait for a worker, by number."""
        self._search: asyncio.Task[None] | None = None
        """For their workers."""
        self._deltas: list[Delta] = []
        self._failure: Exception | None = None
        """What came before it is returned before it is raised."""
        self._news = asyncio.Event()
        self._is_patient = False
        """Only the end is news."""
        self._is_cancelled = False
        self._aborted: set[int] = set()
        """Sequences whose end is awaited, by number, and how far their prompts have come."""
        self._no_more = asyncio.Event()
        """Their ends have come."""

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are drawn: each choice has the same parameters, but for its bounds."""
        return self._runs[0].request.params

    @property
    def finish_reasons(self) -> list[str | None]:
        """One a choice; None: it was given up. Vectors have none."""
        if self._runs[0].request.kind is OutputKind.EMBED:
            return []
        return [run.choice.finish_reason for run in self._runs]

    @property
    def is_refused(self) -> bool:
        """No worker has begun it, for none got it or it has failed before that: nothing was
        used."""
        failure = self._failure
        if isinstance(failure, WorkerFailed) and failure.code in NEVER_BEGUN:
            return not any(prompt.num_reached for prompt in self._prompts)
        return not self._is_sent

    @property
    def usage(self) -> Usage:
        """So far, as far as workers have told."""
        return Usage(
            prompt_tokens=sum([prompt.num_reached for prompt in self._prompts]),
            completion_tokens=sum([choice.num_tokens for choice in self._choices]),
            cached_tokens=sum([prompt.num_cached for prompt in self._prompts]),
            thought_tokens=sum([choice.num_thought_tokens for choice in self._choices]),
        )

    async def step(self) -> list[Delta]:
        """Waits for outputs and returns what all that have arrived add. Raises WorkerFailed,
        DeadlineExceeded, PoisonRequest, or what `fail` was given."""
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
        """Waits for the end of all choices. Raises as `step` does."""
        self._is_patient = True
        deltas: list[Delta] = []
        while not self.is_done:
            deltas += await self.step()
        return deltas

    def fail(self, failure: Exception) -> None:
        """Aborts what still runs. `step` raises the failure once it has returned what came
        before."""
        self._fail(failure)
        self._abort()

    def cancel(self) -> None:
        """Aborts what still runs; harmless afterwards."""
        self._abort()
        for number in self._aborted:
            run = self._runs[number]
            run.worker.cancel(run.id)
        self._aborted.clear()

    async def stop(self, timeout_s: float) -> bool:
        """Aborts what still runs and waits until its workers have reported how far the prompts have
        come. Returns False after `timeout_s`; until then `usage` may still grow."""
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
            # It was lost before it heard of this.
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
        """As it is read, so that no task is woken for a token that is not waited for."""
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
        """The request is over; it is the end of the sequence that may be awaited."""
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
        """One sequence has ended: the next one takes its place."""
        if self._num_begun == len(self._runs):
            return
        number = self._num_begun
        self._num_begun += 1
        run = self._runs[number]
        # An answer has begun, so the deadline of the first output is met.
        run.request = msgspec.structs.replace(run.request, timeout_s=None)
        self._begin(number)

    def _begin_followers(self, first: RemoteSequence, output: SequenceOutput) -> None:
        """The first choice has its first output, with the scores of the prompt. An answer that only
        scores is the same for all."""
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
        """A worker that is not heard of keeps what cannot go elsewhere."""
        run = self._runs[number]
        if not run.tokens and not self._failover.budget.has_room:
            return
        if self._failover.has_other(run.request.model, run.worker):
            run.worker.cancel(run.id)
            self._move(number, WorkerFailed(ErrorCode.WORKER_LOST, "the worker does not answer"))

    def _move(self, number: int, failure: WorkerFailed) -> None:
        """Raises what the sequence ends with, if no other worker may have it."""
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
        """Sends the sequence to a worker, now or as soon as there is one. Raises what it ends with
        if it is not to wait."""
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
            log.info("%s goes on at worker %s", run.request.request_id, run.worker_id)
            return True
        if case.gives_up():
            raise case.failure
        return False

    def _rewritten(self, run: RemoteSequence, worker: WorkerClient) -> Generate:
        """What is left to do of the sequence, for this worker."""
        request, params = run.request, run.request.params
        adapter = request.adapter and self._adapter_for(worker.models[request.model].adapter_layout)
        now = time.perf_counter()
        waited_s = request.waited_s + (now - run.sent_at if run.sent_at else 0.0)
        is_answering = self.first_output_at is not None
        if run.tokens and params.prompt_logprobs is not None:
            # They have come, with the first token.
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
