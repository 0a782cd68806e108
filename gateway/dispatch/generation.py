"""Generates the answers of one request. Merges the outputs of the request's sequences, which may
run on different workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from gateway.dispatch.choice import Delta
from gateway.dispatch.failover import Failover
from gateway.dispatch.placement import Placement, RemoteSequence
from gateway.dispatch.run import Run
from gateway.limits.admission import Reservation, Usage
from workers.wire.client import SequenceEvent, Silence, WorkerFailed
from workers.wire.protocol import (
    ErrorCode,
    FinishReason,
    OutputKind,
    PromptProgress,
    SamplingParams,
    SequenceOutput,
)

NEVER_BEGUN = (
    *(ErrorCode.DRAINING, ErrorCode.MODEL_UNKNOWN, ErrorCode.MODEL_UNAVAILABLE),
    *(ErrorCode.ADAPTER_UNAVAILABLE, ErrorCode.PROMPT_TOO_LONG),
    *(ErrorCode.OVERLOADED, ErrorCode.EXPIRED),
)
"""Error codes that a worker reports before it has computed anything. `INVALID` is excluded, because
workers also report it for answers that they computed but cannot send."""


class Generation:
    """Generation of one request's answers. Await `step` until `is_done`, or await `finish`. Then
    call `placement.cancel`."""

    def __init__(
        self,
        run: Run,
        sequences: Sequence[RemoteSequence],
        reservation: Reservation,
        failover: Failover,
    ) -> None:
        """The first `step` sends the sequences. Tokens that `reservation` does not cover are
        dropped, and the answer ends with finish reason `length`."""
        self.placement = Placement(run, sequences, failover, self._take, self._fail)
        self.first_output_at: float | None = None
        """Time of time.perf_counter() at which the first output arrived. None before that."""
        self.ended_at: float | None = None
        """Time of time.perf_counter() at which the last choice ended."""
        self._sequences = sequences
        self._prompts = list(dict.fromkeys([sequence.prompt for sequence in sequences]))
        self._reservation = reservation
        self._num_running = len(sequences)
        self._is_submitted = False
        self._deltas: list[Delta] = []
        self._failure: Exception | None = None
        """Exception that `step` raises once it has returned the deltas that arrived earlier."""
        self._news = asyncio.Event()
        self._is_patient = False
        """Whether the waiting task is woken only when all choices have ended or one has failed."""

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the first choice. Other choices may differ in `max_tokens`,
        `min_tokens`, `choice` and `prompt_logprobs` and, if the request sets no seed, in `seed`."""
        return self._sequences[0].request.params

    @property
    def finish_reasons(self) -> list[str | None]:
        """Finish reason of each choice. None for a choice that did not finish. Empty for a request
        for vectors."""
        if self._sequences[0].request.kind is OutputKind.EMBED:
            return []
        return [sequence.choice.finish_reason for sequence in self._sequences]

    @property
    def is_refused(self) -> bool:
        """Whether the request used no tokens, because no sequence was sent to a worker, or because
        the request failed before a worker computed any of its prompts."""
        failure = self._failure
        if isinstance(failure, WorkerFailed) and failure.code in NEVER_BEGUN:
            return not any(prompt.num_reached for prompt in self._prompts)
        return not self.placement.is_sent

    @property
    def usage(self) -> Usage:
        """Usage so far, as reported by workers."""
        return Usage(
            prompt_tokens=sum([prompt.num_reached for prompt in self._prompts]),
            completion_tokens=sum([each.choice.num_tokens for each in self._sequences]),
            cached_tokens=sum([prompt.num_cached for prompt in self._prompts]),
            thought_tokens=sum([each.choice.num_thought_tokens for each in self._sequences]),
        )

    async def step(self) -> list[Delta]:
        """Waits for outputs, and returns the deltas of all outputs that have arrived. Raises
        WorkerFailed, DeadlineExceeded, PoisonRequest, or the exception given to `fail`."""
        if not self._is_submitted and self._failure is None:
            self._is_submitted = True
            self.placement.submit()
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
        self.placement.abort()

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._news.set()

    def _take(self, number: int, event: SequenceEvent) -> None:
        """Handles an event as soon as it is read from the worker's connection. Wakes the request's
        task, unless the task waits in `finish` for a later event."""
        sequence = self._sequences[number]
        if isinstance(event, PromptProgress) or (
            isinstance(event, SequenceOutput) and event.finish_reason is not FinishReason.ABORT
        ):
            sequence.prompt.note(event)
        if self._failure is not None or self.placement.is_ended:
            self.placement.note_end(number, event)
            return
        try:
            if isinstance(event, SequenceOutput):
                self._feed(number, event)
            elif isinstance(event, WorkerFailed):
                self.placement.leave(number, event)
            elif isinstance(event, Silence):
                self.placement.leave_silent(number)
            else:
                return
        except Exception as error:
            self._failure = error
        if not self._is_patient or self.is_done or self._failure is not None:
            self._news.set()

    def _feed(self, number: int, output: SequenceOutput) -> None:
        if self.first_output_at is None:
            self.first_output_at = time.perf_counter()
            self.placement.note_answering()
        sequence = self._sequences[number]
        choice = sequence.choice
        if choice.finish_reason is not None:
            return
        if output.times is not None:
            self.placement.note_times(sequence, output)
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
            self.placement.begin_next()
        if sequence.followers:
            self._begin_followers(sequence, output)

    def _begin_followers(self, first: RemoteSequence, output: SequenceOutput) -> None:
        """Begins the other choices of a prompt once its first choice has scored it. `output` is the
        first output of the first choice, and has the scores. If the request only scores prompts,
        all choices get this output."""
        followers, first.followers = first.followers, []
        for number in followers:
            sequence = self._sequences[number]
            if sequence.request.kind is OutputKind.SCORE:
                self._feed(number, output)
                continue
            self.placement.begin_follower(number, first.worker, output.prompt_logprobs)

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
