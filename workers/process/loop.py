"""Loop of the engine thread: handles received messages, and runs the steps of all engines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import assert_never

from workers.base_models.served_models import ServedModels
from workers.execution.engine import Engine, Event
from workers.observe.status import cached_pages, check_integrity
from workers.process.device_scheduler import DeviceScheduler
from workers.process.inbox import EngineCommand, Inbox
from workers.process.outbox import frames
from workers.process.server import SERVER, Command, Delivery, Disconnected, Drained
from workers.verification.adapter_verifier import (
    AdapterVerifier,
    refuse_draining,
    refuse_unavailable,
)
from workers.wire.frames import Abort, CachedPages, Desired, Drain, Models, Probe, Withdraw
from workers.wire.protocol import ErrorCode, Failed, Generate
from workers.wire.status import WorkerStatus

log = logging.getLogger(__name__)


STATUS_PERIOD_S = 1.0
PAGES_PERIOD_S = 0.1
"""Seconds between reports of prefix-cache changes to the gateways."""
INTEGRITY_PERIOD_S = 60.0
"""Seconds between integrity checks, which run only while the worker is idle."""
TIMER_S = 0.02
"""Seconds between checks of request deadlines while there is work but no step can run. A finished
load wakes the loop sooner."""


class WorkerLoop:
    """Loop that runs the engines. The loop's thread shares the memory lock with the loader threads,
    and never holds the lock while it waits or computes."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        memory: Lock,
        verifier: AdapterVerifier,
        served: ServedModels,
        deliver: Callable[[Delivery], None],
        status: Callable[[bool, int], WorkerStatus],
        clock: Callable[[], float],
    ) -> None:
        """memory: lock of the arena that the engines share. status: function of `is_draining` and
        `generation` that returns the worker's status."""
        self._inbox = inbox
        self._device_scheduler = DeviceScheduler()
        self._served = served
        self.models = [model.engine.info for model in served.models.values()]
        """Registered models. The list is replaced, never changed, because the event loop reads it.
        """
        self._memory = memory
        self._verifier = verifier
        self._deliver = deliver
        self._status = status
        self._clock = clock
        self._next_status_s = self._next_check_s = self._next_pages_s = 0.0
        self._busy_since: float | None = None
        self._is_leaving = False
        """Whether the process is shutting down, so that no gateway can turn draining off."""
        self.is_ready = False
        """Whether the loop runs and is not fetching the models of the first `Desired`. A rolling
        update replaces the next worker once this worker is ready, so this worker must first have
        the models that the replaced workers had."""
        self._has_settled = False
        """Whether the models of the first `Desired` have been fetched or have failed."""
        self.is_draining = False
        self.generation = 0
        """Generation of the last `Desired` that was applied."""
        self._pinned_generation = 0
        """Generation of the `Desired` whose pins are applied to every registered model. Becomes -1
        when the set of models changes, so that the same `Desired` is applied again when it is next
        received."""

    @property
    def step_age_s(self) -> float:
        """Seconds since the current step began, or 0 while the loop waits. Thread-safe."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def post(self, connection: int, message: Command) -> None:
        """Refuses a connection's message, or keeps it until `run` handles it. Thread-safe."""
        self._inbox.post(connection, message)

    def stop(self) -> None:
        """Makes `run` return after the current step, dropping running sequences. Thread-safe."""
        self._inbox.stop()

    @property
    def has_work(self) -> bool:
        return any(model.engine.has_work for model in self._served.active.values())

    def run(self) -> None:
        """Runs the loop until `stop`. Called on the thread that built the engines, because OpenMP
        keeps a thread team for each calling thread, and a second team would slow every kernel."""
        self.is_ready = True
        while self._receive():
            self._busy_since = self._clock()
            self._advance_models()
            with self._memory:
                active = self._served.active.values()
                expired = [event for model in active for event in model.engine.expire()]
            self._emit(expired)
            self._emit(self._step())
            with self._memory:
                self._deliver_some(self._verifier.advance())
                self._report()
                self._report_pages()
                self._check()
            self._busy_since = None
        with self._memory:
            self._verifier.close()
        self._served.close()
        self.is_ready = False

    def _step(self) -> list[Event]:
        """Runs one step of one engine. First tries the engines that found nothing to run at their
        last step, and then the other engines, the lowest virtual time first."""
        events: list[Event] = []
        models = {m.engine: m for m in self._served.active.values() if m.engine.has_work}
        for engine in self._device_scheduler.order(models):
            begin_s, others = self._clock(), [each for each in models if each is not engine]
            is_alone = all(each.is_stalled for each in others)
            drain = None if is_alone else partial(self._collect_others, engine, others)
            events += engine.step(is_held=models[engine].state.is_held, drain=drain)
            if not engine.is_stalled:
                self._device_scheduler.charge(engine, self._clock() - begin_s)
                break
        return events

    def _collect_others(self, engine: Engine, others: list[Engine]) -> list[Event]:
        """Collects the steps that other engines have in flight before `engine` launches a step. The
        time counts as theirs."""
        events: list[Event] = []
        for other in others:
            begin_s = self._clock()
            events += other.collect()
            seconds = self._clock() - begin_s
            self._device_scheduler.charge(other, seconds)
            self._device_scheduler.charge(engine, -seconds)
        return events

    def _advance_models(self) -> None:
        self._emit(self._served.advance())
        self._served.register_fetched()
        known = {info.digest for info in self.models}
        if known != self._served.models.keys():
            self._pinned_generation = -1
            self.models = [model.engine.info for model in self._served.models.values()]
            gone = known - self._served.models.keys()
            forgotten = [(0, CachedPages(digest, b"", is_whole=True)) for digest in gone]
            self._deliver([(0, Models(self.models)), *forgotten])
        if self.generation and not self._has_settled:
            self.is_ready = self._has_settled = not self._served.is_fetching

    def _receive(self) -> bool:
        """Handles all received messages. Waits for a message only if no step can run. During a
        shutdown, delivers `Drained` if no work is left. Returns False after `stop`."""
        for connection, message, received_s in self._inbox.take(self._idle_s()):
            with self._memory:
                self._handle(connection, message, received_s)
        if self._is_leaving and not self.has_work:
            self._deliver([(SERVER, Drained())])
        return not self._inbox.is_stopped

    def _idle_s(self) -> float:
        """Returns the maximum seconds to wait for a message, so that other work is not late."""
        engines = [model.engine for model in self._served.active.values()]
        if any(engine.has_work and not engine.is_stalled for engine in engines):
            return 0.0
        left_s = max(self._next_status_s - self._clock(), 0.0)
        return min(left_s, TIMER_S) if self._served.active or self._verifier.has_work else left_s

    def _handle(self, connection: int, message: EngineCommand, received_s: float) -> None:
        match message:
            case Generate():
                self._submit(connection, message, received_s)
            case Abort(id=sequence_id):
                for model in self._served.models.values():
                    self._emit(model.engine.abort(connection, sequence_id))
            case Disconnected():
                for model in self._served.models.values():
                    model.engine.abort_connection(connection)
                self._verifier.abort_connection(connection)
            case Probe():
                self._probe(connection, message)
            case Withdraw(id=probe_id):
                self._verifier.withdraw(connection, probe_id)
            case Desired():
                self._want(message)
            case Drain(is_on=is_on):
                self._drain(is_on, is_leaving=connection == SERVER)
            case _:
                assert_never(message)

    def _drain(self, is_on: bool, is_leaving: bool) -> None:
        """Turns draining on or off. When draining is turned on, waiting sequences are returned to
        the gateways, so that other workers can start them."""
        self._is_leaving |= is_leaving
        self.is_draining = is_on or self._is_leaving
        if self.is_draining:
            self._deliver_some(self._verifier.drain())
            models = self._served.models.values()
            self._emit([event for model in models for event in _give_back(model.engine)])
        self._next_status_s = self._clock()

    def _report(self) -> None:
        """Reports the status every `STATUS_PERIOD_S`. At each report, and while the loop is idle,
        starts to load pinned adapters of models without work."""
        is_due = self._clock() >= self._next_status_s
        if is_due or not self.has_work:
            for model in self._served.models.values():
                if not model.engine.has_work:
                    model.pool.begin_step(())
        if is_due:
            self._next_status_s = self._clock() + STATUS_PERIOD_S
            self._deliver([(0, self._status(self.is_draining, self.generation))])

    def _report_pages(self) -> None:
        """Reports prefix-cache changes every `PAGES_PERIOD_S`, or at once if no engine has work."""
        if self._clock() >= self._next_pages_s or not self.has_work:
            self._next_pages_s = self._clock() + PAGES_PERIOD_S
            models = self._served.models.values()
            pages = [pages for model in models for pages in cached_pages(model.engine)]
            self._deliver_some([(0, each) for each in pages])

    def _probe(self, connection: int, probe: Probe) -> None:
        model = self._served.models.get(probe.model)
        reason = None if model is None else model.refusal(self._clock())
        if self.is_draining:
            refused = refuse_draining(probe)
        elif reason is not None:
            # The probe would otherwise stay in the queue until its gateway withdraws it.
            refused = refuse_unavailable(probe, reason)
        else:
            refused = self._verifier.start(connection, probe)
        if refused is not None:
            self._deliver([(connection, refused)])
        else:
            self._served.activate(probe.model)

    def _want(self, desired: Desired) -> None:
        """Applies the desired state. Each gateway sends a copy of this state. Copies that are
        outdated or already applied are ignored."""
        is_applied = desired.generation <= self._pinned_generation
        if desired.generation < self.generation or is_applied:
            return
        self.generation = self._pinned_generation = desired.generation
        self._served.want(desired.models)
        for digest, model in self._served.models.items():
            model.pool.keep(pin.adapter for pin in desired.pins if pin.model == digest)

    def _check(self) -> None:
        if not self.has_work and self._clock() >= self._next_check_s:
            self._next_check_s = self._clock() + INTEGRITY_PERIOD_S
            for model in self._served.models.values():
                check_integrity(model.engine, model.pool, model.report)

    def _submit(self, connection: int, request: Generate, received_s: float) -> None:
        if self.is_draining:
            failed = Failed(request.id, ErrorCode.DRAINING, "the worker is draining")
        elif (model := self._served.models.get(request.model)) is None:
            failed = Failed(request.id, ErrorCode.MODEL_UNKNOWN, "the base model was unregistered")
        elif (reason := model.refusal(self._clock())) is not None:
            failed = Failed(request.id, ErrorCode.MODEL_UNAVAILABLE, reason)
        else:
            self._served.activate(request.model)
            self._emit(model.engine.offer(connection, request, received_s))
            return
        self._deliver([(connection, failed)])

    def _emit(self, events: list[Event]) -> None:
        self._deliver_some(frames(events, self._verifier.take))

    def _deliver_some(self, delivery: Delivery) -> None:
        if delivery:
            self._deliver(delivery)


def _give_back(engine: Engine) -> list[Event]:
    """Refuses waiting sequences that have not started, so that other workers can start them."""
    waiting = [sequence for sequence in engine.waiting if not sequence.is_begun]
    return engine.fail(waiting, ErrorCode.DRAINING, "the worker is draining")
