"""Proves that adapters have the effect that their files describe, while the engine serves requests.

Probes of one base model run one at a time, so that a probe without room for its adapter delays no
other models. One thread for all models computes, from an adapter's files, the checksum and
log-probabilities that the worker must produce. The engine thread compares this checksum with the
checksum of the loaded image. It then runs the probe prompt as an ordinary sequence, with the
adapter and without, and compares the log-probabilities.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from adapters.errors import AdapterRejected
from adapters.pool.pool import AdapterPool
from adapters.pool.source import AdapterLease, AdapterUnavailable
from adapters.reference import AdapterRef
from workers.execution.engine import Engine
from workers.observe.report import EngineReport
from workers.verification.effect_proof import EffectProof, NotProved
from workers.wire.frames import Fingerprint, Probe, ProbeResult
from workers.wire.protocol import ErrorCode, Failed, Generate, SamplingParams, SequenceOutput

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Generator[None, None, T]
"""Generator that the engine thread advances once per step."""

CONNECTION = -2
"""Connection number under which the verifier submits its own sequences."""

MAX_QUEUED = 64
MAX_TOGETHER = 16
"""Maximum number of adapters that are scored in one pass through the model."""
LEASE_TIMEOUT_S = 30.0
"""Seconds that a probe waits for room for its adapter. Only probes of its model wait with it."""
NUM_TOP = 8
NICENESS = 10


@dataclass(slots=True)
class ModelInstance:
    """Base model that a worker has registered. Its weights may or may not be on the device."""

    engine: Engine
    pool: AdapterPool
    report: EngineReport
    effect_proof: EffectProof
    base_scores: Tensor | None = None


class AdapterVerifier:
    """Verifier that proves the effect of adapters, one probe of each base model at a time. All
    methods are called on the engine thread.

    instances: registered base models by digest.
    """

    def __init__(
        self, instances: Mapping[str, ModelInstance], *, clock: Callable[[], float]
    ) -> None:
        self._instances = instances
        self._clock = clock
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="verifier", initializer=_leave_the_cores
        )
        self._queue: deque[tuple[int, Probe]] = deque()
        self._active: dict[str, tuple[int, Probe, Work[ProbeResult]]] = {}
        """Probe in progress of each base model, with its connection."""
        self._refused: list[tuple[int, ProbeResult]] = []
        """Answers that the next call of `advance` returns."""
        self._outputs: dict[int, SequenceOutput | Failed | None] = {}
        """Output of each submitted sequence, by sequence id. None until it is received."""
        self._num_generates = 0

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._queue or self._refused)

    def start(self, connection: int, probe: Probe) -> ProbeResult | None:
        """Queues the probe and returns None. If the probe is refused, returns the answer
        instead."""
        if probe.model not in self._instances:
            return _refuse(probe, "adapter.probe.no_model", "the worker lacks this base model")
        if len(self._queue) >= MAX_QUEUED:
            return _refuse(probe, "adapter.probe.busy", f"{MAX_QUEUED} probes are waiting")
        self._queue.append((connection, probe))
        return None

    def advance(self) -> list[tuple[int, ProbeResult]]:
        """Starts the first queued probe of each model that is on the device and has no probe in
        progress, and advances the probes in progress. Called between two steps. Returns the
        answers, with their connections, of the probes that have finished or were refused since the
        last call."""
        answers, self._refused = self._refused, []
        for item in list(self._queue):
            model = item[1].model
            if model not in self._active and self._is_here(model):
                self._queue.remove(item)
                self._active[model] = *item, self._answer(item[1])
        for model, (connection, _, work) in list(self._active.items()):
            try:
                next(work)
            except StopIteration as end:
                del self._active[model]
                answers.append((connection, end.value))
        return answers

    def refuse(self, model: str, reason: str) -> None:
        """Refuses the model's queued probes. The next call of `advance` returns the answers."""
        refused = [item for item in self._queue if item[1].model == model]
        self._queue = deque(item for item in self._queue if item[1].model != model)
        self._refused += [(number, refuse_unavailable(probe, reason)) for number, probe in refused]

    def num_probes(self, model: str) -> tuple[int, int]:
        """Returns the number of the model's probes in progress (0 or 1), and the number of its
        queued probes."""
        return int(model in self._active), sum(probe.model == model for _, probe in self._queue)

    def put_back(self, model: str) -> None:
        """Moves the model's probe in progress back to the head of the queue. Called when the model
        is about to be unloaded from the device. The probe restarts after the model's next load."""
        self._queue.extendleft(self._stop(lambda _, probe: probe.model == model))

    def take(self, event: SequenceOutput | Failed) -> None:
        """Receives an event of one of the sequences that the verifier submitted."""
        if event.id in self._outputs:
            self._outputs[event.id] = event

    def abort_connection(self, connection: int) -> None:
        """Drops the probes of a connection that has ended."""
        self._queue = deque(item for item in self._queue if item[0] != connection)
        self._stop(lambda number, _: number == connection)

    def withdraw(self, connection: int, probe_id: int) -> None:
        """Drops a probe that is queued or in progress. If the scores of the probe's adapter are
        already being computed from its files, this computation finishes, and later probes use the
        scores."""
        withdrawn = connection, probe_id
        self._queue = deque(item for item in self._queue if (item[0], item[1].id) != withdrawn)
        self._stop(lambda number, probe: (number, probe.id) == withdrawn)

    def drain(self) -> list[tuple[int, ProbeResult]]:
        """Drops all probes. Returns the connection and the answer of each probe."""
        probes = [*self._queue, *self._stop(lambda *_: True)]
        self._queue.clear()
        return [(connection, refuse_draining(probe)) for connection, probe in probes]

    def close(self) -> None:
        self.drain()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _stop(self, is_meant: Callable[[int, Probe], bool]) -> list[tuple[int, Probe]]:
        """Stops the probes in progress for which the function returns True, and returns them. A
        probe is passed after the number of its connection."""
        stopped: list[tuple[int, Probe]] = []
        for model, (connection, probe, work) in list(self._active.items()):
            if is_meant(connection, probe):
                del self._active[model]
                work.close()
                stopped.append((connection, probe))
        return stopped

    def _is_here(self, model: str) -> bool:
        return self._instances[model].engine.runner is not None

    def _answer(self, probe: Probe) -> Work[ProbeResult]:
        """Proves the probe's adapter and returns the answer. If the proof fails, the answer has the
        error."""
        try:
            return (yield from self._prove(probe))
        except NotProved as error:
            code, is_final, message = error.code, error.is_final, str(error)
        except AdapterRejected as error:
            code, is_final, message = error.code, True, str(error)
        except AdapterUnavailable as error:
            code, is_final, message = error.code, False, str(error)
        except Exception as error:
            log.exception("probe of %s failed", probe.adapter.digest, exc_info=error)
            code, is_final = "adapter.probe.failed", False
            message = f"the probe itself failed: {type(error).__name__}"
        return ProbeResult(probe.id, error=code, message=message, is_final=is_final)

    def _prove(self, probe: Probe) -> Work[ProbeResult]:
        instance, digest = self._instances[probe.model], probe.adapter.digest
        effect_proof = instance.effect_proof
        read = yield from self._on_thread(lambda: effect_proof.read(digest))
        # Another thread packs the image while the files are scored. Packing starts only after the
        # files have been read and checked, because the pool would remember a failure to pack them,
        # and the next proof would fail, too.
        instance.pool.prefetch(AdapterRef(digest, probe.adapter.name))
        next_ones = self._next_ones(probe.model)
        expected = yield from self._on_thread(lambda: effect_proof.expect(digest, next_ones, read))
        proved = AdapterRef(digest, probe.adapter.name, expected.checksum)
        lease = yield from self._lease(instance.pool, AdapterRef(digest))
        checksum = lease.checksum
        lease.release()
        if checksum != expected.checksum:
            instance.pool.prefetch(proved)
            raise NotProved(
                "adapter.image.mismatch",
                f"the image is not what the files give, and is replaced: {checksum}",
                is_final=False,
            )
        if instance.base_scores is None:
            instance.base_scores, _ = yield from self._score(instance, None)
        scores, top = yield from self._score(instance, proved)
        effect = effect_proof.check_scores(expected, scores, instance.base_scores)
        fingerprint = Fingerprint([t for t, _ in top], [p for _, p in top], effect)
        return ProbeResult(probe.id, effect_proof.layout.version, checksum, fingerprint)

    def _next_ones(self, model: str) -> list[str]:
        """Returns the adapters (digests) of the model's queued probes, at most as many as can be
        scored in one pass through the model together with the adapter of the current probe."""
        waiting = [probe.adapter.digest for _, probe in self._queue if probe.model == model]
        return waiting[: MAX_TOGETHER - 1]

    def _on_thread(self, call: Callable[[], T]) -> Work[T]:
        future: Future[T] = self._thread.submit(call)
        try:
            while not future.done():
                yield
            return future.result()
        finally:
            future.cancel()
            # Breaks a reference cycle of this frame, the future, its error and the traceback.
            del future

    def _lease(self, pool: AdapterPool, ref: AdapterRef) -> Work[AdapterLease]:
        deadline = self._clock() + LEASE_TIMEOUT_S
        while not isinstance(lease := pool.acquire(ref), AdapterLease):
            if self._clock() > deadline:
                raise NotProved(
                    "adapter.probe.no_memory", "no adapter memory became free", is_final=False
                )
            yield
        return lease

    def _score(
        self, instance: ModelInstance, adapter: AdapterRef | None
    ) -> Work[tuple[Tensor, list[tuple[int, float]]]]:
        """Returns the engine's log-probability of each token of the probe except the first, float32
        [PROBE_TOKENS - 1], and the likeliest next tokens with their log-probabilities."""
        self._num_generates += 1
        request = Generate(
            self._num_generates,
            "probe",
            instance.engine.info.digest,
            instance.effect_proof.tokens,
            SamplingParams(
                max_tokens=1,
                seed=0,
                temperature=0.0,
                ignore_eos=True,
                logprobs=NUM_TOP,
                prompt_logprobs=0,
            ),
            cache_domain="\0probe",
            adapter=adapter,
        )
        if (failed := instance.engine.submit(CONNECTION, request)) is not None:
            raise _not_scored(failed)
        self._outputs[request.id] = None
        try:
            while (output := self._outputs[request.id]) is None:
                yield
        finally:
            instance.engine.abort(CONNECTION, request.id)
            del self._outputs[request.id]
        if isinstance(output, Failed):
            raise _not_scored(output)
        assert output.prompt_logprobs is not None and output.logprobs is not None
        return torch.tensor([e.logprob for e in output.prompt_logprobs]), output.logprobs[0].top


def refuse_draining(probe: Probe) -> ProbeResult:
    return _refuse(probe, "adapter.probe.draining", "the worker is draining")


def refuse_unavailable(probe: Probe, reason: str) -> ProbeResult:
    return _refuse(probe, "adapter.probe.model_unavailable", reason)


def _refuse(probe: Probe, code: str, message: str) -> ProbeResult:
    return ProbeResult(probe.id, error=code, message=message, is_final=False)


def _not_scored(failed: Failed) -> NotProved:
    message = f"the probe prompt: {failed.code}: {failed.message}"
    if failed.code is ErrorCode.LOGITS_NAN:
        return NotProved("adapter.effect.logits", message, is_final=True)
    return NotProved("adapter.probe.failed", message, is_final=False)


def _leave_the_cores() -> None:
    """Leaves the CPU cores to the engine. Limits torch to one thread for operations that the
    calling thread starts and, on Linux, lowers the priority of the calling thread."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
