"""A worker in this process without its server: requests in, token ids out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic

from adapters.format.module_list import write_module_list
from adapters.format.validator import AdapterFiles, Limits, validate_and_list
from adapters.manifest import BaseModelShape
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from tests.workers.formed_worker import FormedWorker
from workers.process.build import Worker
from workers.process.config import WorkerConfig
from workers.process.server import Delivery, Drained, WorkerMessage
from workers.wire.frames import CachedPages, Models, Probe, ProbeResult
from workers.wire.prefix_index import PrefixIndex
from workers.wire.protocol import ErrorCode, Failed, FinishReason, Generate, SequenceOutput
from workers.wire.status import WorkerStatus


def store_adapter(store: LocalStore, folder: Path, shape: BaseModelShape) -> AdapterRef:
    """Validates and stores what peft saved in `folder`, as an upload would."""
    validated = validate_and_list(AdapterFiles.in_folder(folder), [shape], Limits())
    manifest = validated.manifest
    staged = store.stage()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(folder / name, staged / name)
    write_module_list(staged, validated.modules)
    store.put("adapters", manifest.digest, staged)
    return AdapterRef(manifest.digest, folder.name)


class Driver:
    """Starts the loop of a worker and waits for answers; use as a context manager."""

    def __init__(self, config: WorkerConfig, kind: type[Worker] = FormedWorker) -> None:
        self._deliveries: SimpleQueue[Delivery] = SimpleQueue()
        self.worker = kind(config, instance_id="test", progress=lambda *_: None)
        self.loop = self.worker.make_loop(self._deliveries.put)
        self._thread = Thread(target=self.loop.run)
        self.answers: dict[int, list[int]] = {}
        self.outputs: dict[int, list[SequenceOutput]] = {}
        self.ended: dict[int, FinishReason | ErrorCode] = {}
        self.probed: dict[int, ProbeResult] = {}
        self.status: WorkerStatus | None = None
        self.models = self.loop.models
        self.prefixes = PrefixIndex()
        self.is_drained = False

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.stop()
        self._thread.join()
        self.worker.close()

    def submit(self, request: Generate) -> None:
        self.answers[request.id] = []
        self.outputs[request.id] = []
        self.loop.post(0, request)

    def run(self, *requests: Generate) -> None:
        """Submits the requests, and returns when everything submitted has ended."""
        for request in requests:
            self.submit(request)
        self.wait()

    def wait(self) -> None:
        """Returns when everything submitted has ended."""
        self._take_until(lambda: len(self.ended) >= len(self.answers))

    def await_begun(self, number: int) -> None:
        """Returns when the request has its first output."""
        self._take_until(lambda: bool(self.outputs[number]))

    def await_first(self, number: int) -> None:
        """Returns when the request has its first token."""
        self._take_until(lambda: bool(self.answers[number]))

    def probe(self, number: int, model: str, adapter: AdapterRef) -> ProbeResult:
        self.loop.post(0, Probe(number, model, adapter))
        return self.await_probe(number)

    def await_probe(self, number: int) -> ProbeResult:
        """Takes what else comes meanwhile."""
        self._take_until(lambda: number in self.probed)
        return self.probed[number]

    def await_status(self, condition: Callable[[WorkerStatus], bool]) -> WorkerStatus:
        """The first that meets the condition, of those that come once a second."""
        deadline = monotonic() + 120
        while self.status is None or not condition(self.status):
            assert monotonic() < deadline, self.status
            for _, message in self._deliveries.get(timeout=120):
                self._take(message)
        return self.status

    def await_models(self, *names: str) -> None:
        """Returns when the worker serves exactly these."""
        self._take_until(lambda: {model.name for model in self.models} == {*names})

    def await_drained(self) -> None:
        self._take_until(lambda: self.is_drained)

    def _take_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for _, message in self._deliveries.get(timeout=120):
                self._take(message)

    def _take(self, message: WorkerMessage | Drained) -> None:
        if isinstance(message, Drained):
            self.is_drained = True
            return
        if isinstance(message, WorkerStatus):
            self.status = message
            return
        if isinstance(message, CachedPages):
            self.prefixes.apply(message)
            return
        if isinstance(message, Models):
            self.models = message.models
            return
        if isinstance(message, ProbeResult):
            self.probed[message.id] = message
            return
        if isinstance(message, Failed):
            self.ended[message.id] = message.code
            return
        for output in message.sequences:
            self.outputs[output.id].append(output)
            self.answers[output.id] += output.tokens
            if output.finish_reason is not None:
                self.ended[output.id] = output.finish_reason
