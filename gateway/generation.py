"""The sequences of one request on one worker: sent, merged and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from gateway.admission import Reservation, Usage
from gateway.choice import Choice, Delta
from workers.client import WorkerClient, WorkerFailed
from workers.protocol import FinishReason, Generate, SequenceOutput


class Generation:
    """Await `step` until `is_done`, or `finish`; then or before that `cancel`."""

    def __init__(
        self,
        worker: WorkerClient,
        requests: Sequence[Generate],
        choices: Sequence[Choice],
        reservation: Reservation,
    ) -> None:
        """`requests[i]` is the sequence of `choices[i]`; sent with the first `step`. What the
        reservation does not cover is not given: the answer ends for its length."""
        self.worker = worker
        self.first_output_at: float | None = None
        """Of time.perf_counter()."""
        self._reservation = reservation
        self._requests = requests
        self._choices = choices
        self._num_running = len(choices)
        self._ids: list[int] = []
        """Of the sequences, at the worker's client."""
        self._deltas: list[Delta] = []
        self._failure: Exception | None = None
        """What came before it is returned before it is raised."""
        self._news = asyncio.Event()
        self._is_patient = False
        """Only the end is news."""

    @property
    def is_done(self) -> bool:
        return self._num_running == 0

    @property
    def finish_reasons(self) -> list[str | None]:
        """One a choice; None: it was given up."""
        return [choice.finish_reason for choice in self._choices]

    @property
    def usage(self) -> Usage:
        """So far; a prompt counts once, and what was cached of it as its first choice found it."""
        firsts = {id(choice.prompt): choice for choice in reversed(self._choices)}.values()
        return Usage(
            prompt_tokens=sum(len(choice.prompt) for choice in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(choice.num_cached_tokens for choice in firsts),
        )

    async def step(self) -> list[Delta]:
        """Waits for outputs and returns what all that have arrived add. Raises WorkerFailed."""
        if not self._ids:
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
        """Waits for the end of all choices. Raises WorkerFailed."""
        self._is_patient = True
        deltas: list[Delta] = []
        while not self.is_done:
            deltas += await self.step()
        return deltas

    def cancel(self) -> None:
        """Aborts what still runs; harmless afterwards."""
        for sequence_id in self._ids:
            self.worker.cancel(sequence_id)

    def _submit(self) -> None:
        for number, request in enumerate(self._requests):
            self._ids.append(self.worker.send(request, partial(self._take, number)))

    def _take(self, number: int, output: SequenceOutput | WorkerFailed) -> None:
        """As it is read, so that nobody is woken for a token that nobody waits for."""
        if self._failure is not None:
            return
        try:
            if isinstance(output, WorkerFailed):
                raise output
            self._feed(number, output)
        except Exception as error:
            self._failure = error
        if not self._is_patient or self.is_done or self._failure is not None:
            self._news.set()

    def _feed(self, number: int, output: SequenceOutput) -> None:
        if self.first_output_at is None:
            self.first_output_at = time.perf_counter()
        choice = self._choices[number]
        if choice.finish_reason is not None:
            return
        self._deltas.append(choice.feed(self._covered(output)))
        if choice.finish_reason is not None:
            self._num_running -= 1
            if output.finish_reason is None:
                self.worker.cancel(self._ids[number])

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
