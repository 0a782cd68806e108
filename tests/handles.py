"""The outputs of one sequence of a worker, for tests and benchmarks that read them in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from workers.wire.client import SequenceEvent, Silence, WorkerClient, WorkerFailed
from workers.wire.protocol import Generate, PromptProgress, SequenceOutput


class Handle:
    """The outputs of one sequence as an async iterator that raises WorkerFailed.

    At most as many outputs wait here as the sequence may have tokens.
    """

    def __init__(self, client: WorkerClient, request: Generate) -> None:
        self.id = client.send(request, self._put)
        self._client = client
        self._outputs: asyncio.Queue[SequenceOutput | WorkerFailed | None] = asyncio.Queue()
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        if self._is_over:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, SequenceOutput):
            self._is_over = output.finish_reason is not None
            return output
        self._is_over = True
        if output is None:
            raise StopAsyncIteration
        raise output

    def cancel(self) -> None:
        """Gives the sequence up: the worker frees it within a step, iteration ends. Harmless
        twice."""
        self._client.cancel(self.id)
        if not self._is_over:
            self._is_over = True
            self._outputs.put_nowait(None)

    def _put(self, output: SequenceEvent) -> None:
        if not isinstance(output, Silence | PromptProgress):
            self._outputs.put_nowait(output)
