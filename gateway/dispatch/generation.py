"""Generates the answers of one request: sends its sequences to workers, moves a sequence whose
worker refused or lost it, and merges their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

import msgspec

from gateway.dispatch.failover import Failover, RetryState
from gateway.dispatch.run import Run
from gateway.dispatch.sequence import Choice, Delta, Move, PromptUsage, Sequence, WorkerTimes
from gateway.exceptions import DeadlineExceeded
from gateway.limits.admission import Reservation, Usage
from workers.wire.client import SequenceEvent, Silence, WorkerClient, WorkerFailed
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    Generate,
    OutputKind,
    PromptProgress,
    SamplingParams,
    SequenceOutput,
)

log = logging.getLogger(__name__)

NEVER_BEGUN = (
    *(ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN, ErrorCode.MODEL_UNAVAILABLE),
    *(ErrorCode.ADAPTER_UNAVAILABLE, ErrorCode.PROMPT_TOO_LONG),
    *(ErrorCode.OVERLOADED, ErrorCode.EXPIRED),
)
"""Error codes that a worker reports before it has computed anything. `INVALID` is excluded, because
workers also report it for answers that they computed but cannot send."""
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


class Generation:
    """Generation of one request's answers. Await `step` until `is_done`, or await `finish`. Then
    call `cancel`. Handles each event of a worker as soon as it is read from the connection."""

    def __init__(
        self,
        run: Run,
        frames: list[Generate],
        reservation: Reservation,
        worker: WorkerClient,
        adapter_layout: str,
        failover: Failover,
    ) -> None:
        """The first `step` sends the sequences. `frames` has one frame for each prompt. Tokens that
        `reservation` does not cover are dropped, and the answer ends with finish reason `length`.
        `adapter_layout` is the layout of `worker` when it was chosen, because it may have been lost
        in the meantime."""
        self.first_output_at: float | None = None
        """Time of time.perf_counter() at which the first output arrived. None before that."""
        self.ended_at: float | None = None
        """Time of time.perf_counter() at which the last choice ended."""
        self.worker_id = worker.instance_id
        """Instance id of the worker to which a sequence was last sent."""
        self.moves: list[Move] = []
        """First `MAX_MOVES` moves of the request's sequences."""
        self.worker_times: WorkerTimes | None = None
        """Stage times of the sequence that reported last. None if the request is not traced."""
        self._run = run
        self._frames = frames
        self._reservation = reservation
        self._worker = worker
        self._adapter = run.target.adapter_for(adapter_layout)
        self._failover = failover
        self._sequences: list[Sequence] = []
        """Sequences in the order of their choices. Those beyond `MAX_AT_ONCE` are made when they
        are sent, because many at once would occupy the event loop."""
        self._num_total = self._num_running = len(frames) * run.request.num_choices
        self._is_submitted = False
        self._is_ended = False
        """Whether the sequences were aborted."""
        self._deltas: list[Delta] = []
        self._failure: Exception | None = None
        """Exception that `step` raises once it has returned the deltas that arrived earlier."""
        self._news = asyncio.Event()
        self._is_patient = False
        """Whether the waiting task is woken only when all choices have ended or one has failed."""
        self._expiry: asyncio.TimerHandle | None = None
        self._stranded: set[Sequence] = set()
        """Sequences that wait for a worker."""
        self._search: asyncio.Task[None] | None = None
        self._aborted: set[Sequence] = set()
        """Aborted sequences whose workers have not reported their end yet."""
        self._no_more = asyncio.Event()
        """Set when the ends of all aborted sequences have been reported."""
        timeout_s = run.deadline - time.perf_counter()
        for _ in range(min(self._num_total, MAX_AT_ONCE)):
            self._make(timeout_s)

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the first choice. Other choices may differ in `max_tokens`,
        `min_tokens`, `choice` and `prompt_logprobs` and, if the request sets no seed, in `seed`."""
        return self._sequences[0].frame.params

    @property
    def finish_reasons(self) -> list[str | None]:
        """Finish reason of each choice. None for a choice that did not finish. Empty for a request
        for vectors."""
        if self._frames[0].kind is OutputKind.EMBED:
            return []
        return [sequence.choice.finish_reason for sequence in self._sequences]

    @property
    def is_refused(self) -> bool:
        """Whether the request used no tokens, because no sequence was sent to a worker, or because
        the request failed before a worker computed any of its prompts."""
        failure = self._failure
        if isinstance(failure, WorkerFailed) and failure.code in NEVER_BEGUN:
            return not self.usage.prompt_tokens
        return not any(sequence.sent_at for sequence in self._sequences)

    @property
    def usage(self) -> Usage:
        """Usage so far, as reported by workers."""
        choices = [sequence.choice for sequence in self._sequences]
        prompts = [each.usage for each in self._sequences[:: self._run.request.num_choices]]
        return Usage(
            prompt_tokens=sum([prompt.num_reached for prompt in prompts]),
            completion_tokens=sum([choice.num_tokens for choice in choices]),
            cached_tokens=sum([prompt.num_cached for prompt in prompts]),
            thought_tokens=sum([choice.num_thought_tokens for choice in choices]),
        )

    async def step(self) -> list[Delta]:
        """Waits for outputs, and returns the deltas of all outputs that have arrived. Raises
        WorkerFailed, DeadlineExceeded, PoisonRequest, or the exception given to `fail`."""
        if not self._is_submitted and self._failure is None:
            self._is_submitted = True
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

    async def stop(self, timeout_s: float) -> bool:
        """Aborts running sequences, and waits until their workers have reported how much of the
        prompts they computed. Returns False if a report is missing after `timeout_s` seconds."""
        self._abort()
        if self._aborted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._no_more.wait()
        return not self._aborted

    def cancel(self) -> None:
        """Aborts running sequences without waiting for reports. May be called repeatedly."""
        self._abort()
        for sequence in self._aborted:
            sequence.worker.cancel(sequence.id)
        self._aborted.clear()

    def _make(self, timeout_s: float | None) -> Sequence:
        """Adds the next sequence, whose worker must begin it within `timeout_s` seconds."""
        number = len(self._sequences)
        prompt, choice = divmod(number, self._run.request.num_choices)
        first = self._sequences[number - choice] if choice else None
        frame, max_tokens = self._frames[prompt], self._reservation.max_tokens[prompt]
        params = msgspec.structs.replace(
            frame.params,
            max_tokens=max_tokens,
            min_tokens=min(frame.params.min_tokens, max_tokens),
            choice=choice,
            # The first choice scores the prompt for all choices.
            prompt_logprobs=None if choice else frame.params.prompt_logprobs,
        )
        sequence = Sequence(
            msgspec.structs.replace(
                frame, params=params, adapter=frame.adapter and self._adapter, timeout_s=timeout_s
            ),
            Choice(self._run, self._run.prompts[prompt], number),
            PromptUsage(len(frame.tokens)) if first is None else first.usage,
            self._worker,
            self._worker.instance_id,
        )
        if first is not None and frame.params.prompt_logprobs is not None:
            first.followers.append(sequence)
        self._sequences.append(sequence)
        return sequence

    def _submit(self) -> None:
        """Sends the first sequences, and begins to wait for the first output."""
        self._failover.budget.note_sent(self._num_total)
        left_s = self._run.deadline - time.perf_counter()
        self._expiry = asyncio.get_running_loop().call_later(left_s + GRACE_S, self._expire)
        waiting = {each for sequence in self._sequences for each in sequence.followers}
        for sequence in self._sequences:
            if sequence not in waiting:
                self._begin(sequence)

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("No answer began within the time that this request had."))

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._news.set()

    def _abort(self) -> None:
        """Aborts running sequences. May be called repeatedly."""
        if self._is_ended:
            return
        self._is_ended = True
        self._stop_expiry()
        if self._search is not None:
            self._search.cancel()
            self._search = None
        for sequence in self._sequences:
            if sequence.usage.is_whole:
                sequence.worker.cancel(sequence.id)
            elif sequence.worker.abort(sequence.id):
                self._aborted.add(sequence)

    def _handle(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Handles an event of a sequence. Wakes the request's task, unless the task waits in
        `finish` for a later event."""
        if isinstance(event, PromptProgress) or (
            isinstance(event, SequenceOutput) and event.finish_reason is not FinishReason.ABORT
        ):
            sequence.usage.note(event)
        if self._failure is not None or self._is_ended:
            self._note_end(sequence, event)
            return
        try:
            if isinstance(event, SequenceOutput):
                self._feed(sequence, event)
            elif isinstance(event, WorkerFailed):
                self._move(sequence, event)
            elif isinstance(event, Silence):
                self._leave_silent(sequence)
            else:
                return
        except Exception as error:
            self._failure = error
        if not self._is_patient or self.is_done or self._failure is not None:
            self._news.set()

    def _note_end(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Records a sequence's end after the request has ended. `stop` may be waiting for it."""
        if isinstance(event, WorkerFailed) or (
            isinstance(event, SequenceOutput) and event.finish_reason is not None
        ):
            self._note_times(sequence, event)
            self._aborted.discard(sequence)
            if self._is_ended and not self._aborted:
                self._no_more.set()

    def _note_times(self, sequence: Sequence, event: SequenceOutput | WorkerFailed) -> None:
        if event.times is not None:
            is_last = isinstance(event, WorkerFailed) or event.finish_reason is not None
            worker_id, sent_at = sequence.worker_id, sequence.sent_at
            self.worker_times = WorkerTimes(worker_id, sent_at, event.times, is_last)

    def _feed(self, sequence: Sequence, output: SequenceOutput) -> None:
        choice = sequence.choice
        if self.first_output_at is None:
            self.first_output_at = time.perf_counter()
            self._stop_expiry()
        if choice.finish_reason is not None:
            return
        self._note_times(sequence, output)
        sequence.tokens += output.tokens
        if sequence.prompt_logprobs is not None:
            output = msgspec.structs.replace(output, prompt_logprobs=sequence.prompt_logprobs)
            sequence.prompt_logprobs = None
        self._deltas.append(choice.feed(self._covered(output)))
        if choice.finish_reason is not None:
            self._num_running -= 1
            self.ended_at = time.perf_counter()
            if output.finish_reason is None:
                sequence.worker.cancel(sequence.id)
            if len(self._sequences) < self._num_total:
                self._begin(self._make(timeout_s=None))
        if sequence.followers:
            self._begin_followers(sequence, output)

    def _begin_followers(self, first: Sequence, output: SequenceOutput) -> None:
        """Begins the other choices of a prompt once its first choice has scored it. `output` is the
        first output of the first choice, and has the scores. If the request only scores prompts,
        all choices get this output."""
        followers, first.followers = first.followers, []
        for sequence in followers:
            if sequence.frame.kind is OutputKind.SCORE:
                self._feed(sequence, output)
                continue
            sequence.prompt_logprobs = output.prompt_logprobs
            sequence.frame = self._frame_for(sequence, first.worker)
            sequence.worker = first.worker
            self._begin(sequence)

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

    def _begin(self, sequence: Sequence) -> None:
        try:
            self._send(sequence, sequence.worker)
        except WorkerFailed as failure:
            if failure.code is not ErrorCode.WORKER_LOST:
                raise
            # The worker was lost before it received the sequence.
            self._retries(sequence).exclude(sequence.worker)
            self._place(sequence)

    def _send(self, sequence: Sequence, worker: WorkerClient) -> None:
        sequence.send(worker, partial(self._handle, sequence))
        self.worker_id = sequence.worker_id

    def _leave_silent(self, sequence: Sequence) -> None:
        """Moves the sequence off a silent worker, unless no other worker can take it."""
        if not sequence.tokens and not self._failover.budget.has_room:
            return
        if self._failover.has_other(sequence.frame.model, sequence.worker):
            sequence.worker.cancel(sequence.id)
            self._move(sequence, WorkerFailed(ErrorCode.WORKER_LOST, "the worker does not answer"))

    def _move(self, sequence: Sequence, failure: WorkerFailed) -> None:
        """Moves a sequence whose worker refused it or was lost. Raises the sequence's error if it
        may not move."""
        self._failover.full.note(sequence.worker, sequence.frame, self._run.num_bytes, failure)
        if sequence.choice.finish_reason is not None:
            return
        self._note_times(sequence, failure)
        retries = self._retries(sequence)
        if len(sequence.tokens) > sequence.frame.num_resumed:
            retries.note_progress()
        retries.add(
            *(failure, sequence.worker, sequence.worker_id),
            is_begun=bool(sequence.tokens),
            is_answering=self.first_output_at is not None,
        )
        self._place(sequence)

    def _retries(self, sequence: Sequence) -> RetryState:
        if sequence.retries is None:
            sequence.retries = RetryState(self._failover)
        return sequence.retries

    def _place(self, sequence: Sequence) -> None:
        """Sends the sequence to another worker, or queues it until one is found. Raises the
        sequence's error if it may not wait."""
        if self._is_placed(sequence):
            return
        self._stranded.add(sequence)
        if self._search is None:
            self._search = asyncio.create_task(self._look_for_workers())

    def _is_placed(self, sequence: Sequence) -> bool:
        retries = self._retries(sequence)
        if retries.is_suspected():
            return False
        find, num_bytes = self._failover.find, self._run.num_bytes
        while (worker := find(sequence.frame, retries.excluded, num_bytes)) is not None:
            sequence.frame = self._frame_for(sequence, worker)
            left = sequence.worker_id
            try:
                self._send(sequence, worker)
            except WorkerFailed as failure:
                if failure.code is not ErrorCode.WORKER_LOST:
                    raise
                retries.exclude(worker)
                continue
            self._failover.note_move(sequence.frame)
            if len(self.moves) < MAX_MOVES:
                to, num_resumed = sequence.worker_id, len(sequence.tokens)
                self.moves.append(Move(sequence.sent_at, left, to, retries.reason, num_resumed))
            log.info("%s moved to worker %s", self._run.request_id, sequence.worker_id)
            return True
        if retries.gives_up():
            raise retries.failure
        return False

    def _frame_for(self, sequence: Sequence, worker: WorkerClient) -> Generate:
        """Returns the frame that continues the sequence on this worker."""
        frame, target = sequence.frame, self._run.target
        layout = worker.models[frame.model].adapter_layout
        is_answering = self.first_output_at is not None
        return sequence.next_frame(
            frame.adapter and target.adapter_for(layout),
            None if is_answering else self._run.deadline,
        )

    async def _look_for_workers(self) -> None:
        try:
            while self._stranded:
                await asyncio.sleep(SEARCH_INTERVAL_S)
                self._stranded -= {each for each in self._stranded if self._is_placed(each)}
        except Exception as failure:
            self._fail(failure)
        self._search = None
