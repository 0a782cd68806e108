"""A worker whose answers a test writes: the worker's own server over a unix socket, no engine.

Unlike `StubWorker`, whose replies are one token a step, its scripts say what each step holds and
may fail anywhere.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.gateway.scripts import Script, say
from workers.process.server import Command, Disconnected, Server
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.protocol import (
    Abort,
    AdapterRef,
    AdapterStatus,
    Desired,
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ModelInfo,
    Models,
    ModelStatus,
    Prefetch,
    SequenceOutput,
    StepFrame,
    WorkerStatus,
)

DIGEST = "d" * 64
MAX_MODEL_LEN = 128
LAYOUT = "scripted-1"

Key = tuple[int, int]


class ScriptedWorker:
    """`requests` are all Generates in order; `aborted` those among them that were given up."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        """Its instance id, with a number from its second start on."""
        self.script: Script = say("hello")
        self.requests: list[Generate] = []
        self.aborted: list[Generate] = []
        self.prefetched: list[AdapterRef] = []
        self.desired: list[Desired] = []
        self.is_ready = True
        self.step_age_s = 0.0
        self.models = [ModelInfo(DIGEST, "tiny", MAX_MODEL_LEN, LAYOUT)]
        self._running: dict[Key, tuple[Generate, asyncio.Task[None]]] = {}
        self._due: dict[int, list[SequenceOutput]] = {}
        self._server: Server
        self._num_starts = 0
        self._folder = tempfile.TemporaryDirectory(prefix="lpx-")

    async def clients(self) -> Sequence[WorkerClient]:
        """Starts, and makes a client for it."""
        await self.start()
        return [WorkerClient(self._server.address)]

    async def start(self) -> None:
        """Serves in the running loop; also again after `stop`."""
        path = Path(self._folder.name) / "worker.sock"
        self._num_starts += 1
        number = f"-{self._num_starts}" if self._num_starts > 1 else ""
        self._server = Server(f"unix:{path}", instance_id=self.name + number)
        await self._server.start(self)

    async def stop(self) -> None:
        """Drops every connection, as a killed worker does."""
        await self._server.close()

    async def close(self) -> None:
        await self.stop()
        self._folder.cleanup()

    def report(
        self,
        *adapters: AdapterStatus,
        draining: bool = False,
        models: Sequence[ModelStatus] = (),
    ) -> None:
        """Sends a status with these."""
        status = WorkerStatus(self.name, draining, list(models), list(adapters), 0, "", {}, 0, 0.0)
        self._server.deliver([(0, status)])

    def offer(self, *models: ModelInfo) -> None:
        """Serves these base models from now on."""
        self.models = list(models)
        self._server.deliver([(0, Models(self.models))])

    def post(self, connection: int, message: Command) -> None:
        match message:
            case Generate():
                self.requests.append(message)
                task = asyncio.create_task(self._run((connection, message.id), message))
                self._running[connection, message.id] = message, task
            case Abort(id=sequence_id):
                if self._give_up((connection, sequence_id)):
                    end = SequenceOutput(sequence_id, [], finish_reason=FinishReason.ABORT)
                    self._emit(connection, end)
            case Disconnected():
                for key in [key for key in self._running if key[0] == connection]:
                    self._give_up(key)
            case Prefetch():
                self.prefetched.append(message.adapter)
            case Desired():
                self.desired.append(message)
            case _:
                raise AssertionError(f"unexpected {message}")

    def _give_up(self, key: Key) -> bool:
        """Whether it ran."""
        request, task = self._running.pop(key, (None, None))
        if request is None or task is None:
            return False
        task.cancel()
        self.aborted.append(request)
        return True

    async def _run(self, key: Key, request: Generate) -> None:
        connection, sequence_id = key
        try:
            async for output in self.script(request):
                self._emit(connection, msgspec.structs.replace(output, id=sequence_id))
                if output.finish_reason is not None:
                    break
        except WorkerFailed as failure:
            self._flush(connection)
            told = failure.retry_after_s, failure.pace_s
            failed = Failed(sequence_id, failure.code, failure.message, *told)
            self._server.deliver([(connection, failed)])
        except Exception as error:
            self._server.deliver(
                [(connection, Failed(sequence_id, ErrorCode.INTERNAL, str(error)))]
            )
        self._running.pop(key, None)

    def _emit(self, connection: int, output: SequenceOutput) -> None:
        """What arises in one turn of the loop goes in one frame, as in an engine's step."""
        if connection not in self._due:
            self._due[connection] = []
            asyncio.get_running_loop().call_soon(self._flush, connection)
        self._due[connection].append(output)

    def _flush(self, connection: int) -> None:
        if outputs := self._due.pop(connection, None):
            self._server.deliver([(connection, StepFrame(outputs))])
