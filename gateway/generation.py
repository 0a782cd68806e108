"""The sequences of one request on one worker: sent, merged and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from gateway.admission import Reservation, Usage
from gateway.choice import Choice, Delta
from workers.client import Handle, WorkerClient
from workers.protocol import FinishReason, Generate, SequenceOutput


class Generation:
    """Await `step` until `is_done`, then or before that `cancel`."""

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
        self._reservation = reservation
        self.first_output_at: float | None = None
        """Of time.perf_counter()."""
        self._requests = requests
        self._choices = choices
        self._handles: list[Handle] = []
        self._merged: asyncio.Queue[tuple[int, SequenceOutput] | Exception] = asyncio.Queue()
        self._failure: Exception | None = None
        """Came with outputs, which are returned before it is raised."""
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

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
        if not self._handles:
            self._submit()
        deltas: list[Delta] = []
        outputs = await self._receive()
        if self.first_output_at is None:
            self.first_output_at = time.perf_counter()
        for i, output in outputs:
            choice = self._choices[i]
            if choice.finish_reason is None:
                deltas.append(choice.feed(self._covered(output)))
                if choice.finish_reason is not None and output.finish_reason is None:
                    self._handles[i].cancel()
        return deltas

    def cancel(self) -> None:
        """Aborts what still runs; harmless afterwards."""
        for pump in self._pumps:
            pump.cancel()
        for handle in self._handles:
            handle.cancel()

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

    def _submit(self) -> None:
        for request in self._requests:
            self._handles.append(self.worker.submit(request))
        if len(self._handles) > 1:
            self._pumps = [asyncio.create_task(self._pump(i)) for i in range(len(self._handles))]

    async def _receive(self) -> list[tuple[int, SequenceOutput]]:
        if len(self._handles) == 1:
            return [(0, await anext(self._handles[0]))]
        outputs: list[tuple[int, SequenceOutput]] = []
        while not outputs or not self._merged.empty():
            item = self._failure or await self._merged.get()
            if not isinstance(item, Exception):
                outputs.append(item)
            elif outputs:
                self._failure = item
                break
            else:
                raise item
        return outputs

    async def _pump(self, i: int) -> None:
        try:
            async for output in self._handles[i]:
                self._merged.put_nowait((i, output))
        except Exception as error:
            self._merged.put_nowait(error)
