"""Engine of one base model: receives requests, schedules, launches and collects steps, and emits
events. It runs on one thread; adapters load on other threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from memory.accounts import Tenant
from memory.block_table import BlockTable
from workers.execution.answer import Answer
from workers.execution.observer import FinishedStep, StepObserver
from workers.execution.step_builder import BlockTables, build_step_input
from workers.execution.step_input import (
    DeviceFailed,
    PendingStep,
    Runner,
    SequenceResult,
    StepOutput,
)
from workers.scheduling.constraint import ConstraintSource
from workers.scheduling.intake import Refusal
from workers.scheduling.schedule import Schedule, ScheduledSequence
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ModelInfo,
    OutputKind,
    PromptProgress,
    SequenceOutput,
)
from workers.wire.request_check import RequestLimits, check_request

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Number of consecutive failed steps after which the device, not the requests, counts as faulty."""

DRAWING_ERRORS = {
    ErrorCode.LOGITS_NAN: "the model's output is not numbers",
    ErrorCode.INTERNAL: "the step gave other than one token to a sequence of the step ahead",
}

EXPIRED = "its time was over before its prompt could begin"

Event = tuple[int, SequenceOutput | PromptProgress | Failed]
"""Connection number, and the output, progress or failure of one of that connection's sequences."""


class NewTokens(NamedTuple):
    """New tokens of a sequence: `num_drawn` tokens of the step, then tokens that its constraint
    forces. finish_reason: why the sequence ends with these tokens, or None if it continues."""

    tokens: list[int]
    num_drawn: int
    finish_reason: FinishReason | None


NOTHING_NEW = NewTokens([], 0, None)


class EngineFailed(Exception):
    """Raised when steps keep failing, or when the device may still use memory that is to be reused.
    The process must exit, because a worker that fails requests fast attracts ever more requests."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Launched step whose result has not been collected. Times in seconds of the engine's clock."""

    schedule: Schedule
    step: PendingStep
    start_s: float
    launched_s: float
    schedule_us: int
    build_us: int

    def wait(self) -> StepOutput | Exception:
        """Waits for the step and returns its result, or the exception that it raised."""
        try:
            return self.step.result()
        except Exception as error:
            return error


class Engine:
    """Continuous batching for one model. Every accepted `Generate` ends with a finish reason or a
    `Failed`.

    `step` and `suspend` acquire the memory lock, but release it while they wait for the device or
    for grammars. All other methods are called with the lock held. `step` raises EngineFailed.

    If the device works asynchronously (`runs_ahead`), the next step is scheduled and launched while
    a step is in flight, on the assumption that each sequence in flight receives one token. Results
    of sequences that end in the meantime are discarded. Tokens stay on the device from step to
    step, so the device does not wait for the host. A sequence whose constraint `needs_host_token`
    is left out of the next step until its token is on the host.

        host    schedule 1 | schedule 2 | wait for 1, schedule 3 | wait for 2, schedule 4 | ...
        device             | step 1 ............| step 2 ...............| step 3 ...
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        runner: Runner | None,
        observer: StepObserver,
        constraints: ConstraintSource,
        limits: RequestLimits,
        *,
        clock: Callable[[], float],
        runs_ahead: bool = False,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        """None while the weights are not on the device. Requests are queued in the meantime."""
        self._observer = observer
        self._constraints = constraints
        self._tables = BlockTables(scheduler.kv.pool)
        self._limits = limits
        self._clock = clock
        self._runs_ahead = runs_ahead
        self.last_schedule = Schedule()
        self._in_flight: deque[InFlightStep] = deque()
        self._ended_s = 0.0
        """Time when the last step ended."""
        self._num_failed_steps = 0
        """Number of consecutive failed steps."""
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._answers: dict[Sequence, Answer] = {}
        self.num_generated_tokens = 0
        self.is_stalled = True
        """Whether the last step found nothing to run: no work, or all work waits for adapters."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def weight(self) -> int:
        """Sum of the weights of all tenants with work in this engine."""
        return self.scheduler.policy.weight

    def refusal(self, request: Generate) -> tuple[ErrorCode, str] | None:
        """Returns why the request can never run, or None if it can. Thread-safe; needs no lock."""
        if (reason := self._constraints.refusal(request)) is not None:
            return ErrorCode.INVALID, reason
        return check_request(request, self._limits)

    def submit(self, connection: int, request: Generate) -> Failed | None:
        """Queues the request even if the queue is full. The request's id must be new. Returns an
        error if the request can never run."""
        if (refusal := self.refusal(request)) is not None:
            return Failed(request.id, *refusal)
        self._add(self._sequence(connection, request, self._clock()))
        return None

    def offer(self, connection: int, request: Generate, arrival_s: float) -> list[Event]:
        """Queues the request if the queue has room or can make room. `refusal` must have returned
        None for it. Returns refusals: of this request, or of queued requests that make room for it
        because their tenants fill more than their share."""
        if (connection, request.id) in self._sequences:
            message = f"sequence id {request.id} is in use"
            return [(connection, Failed(request.id, ErrorCode.INVALID, message))]
        sequence = self._sequence(connection, request, arrival_s)
        refusals = self.scheduler.intake.refuse_for(sequence, self._clock())
        if not any(refusal.sequence is sequence for refusal in refusals):
            self.scheduler.load_adapter(sequence.adapter, sequence.block_table.tenant)
            self._add(sequence)
        return [self._refuse(refusal) for refusal in refusals]

    def expire(self) -> list[Event]:
        """Fails waiting sequences whose deadline for the first token has passed."""
        expired = self.scheduler.policy.pop_expired(self._clock())
        return [self._fail(sequence, ErrorCode.EXPIRED, EXPIRED) for sequence in expired]

    def abort(self, connection: int, sequence_id: int) -> list[Event]:
        """Removes the sequence at once. Returns its last prompt progress, which includes steps in
        flight, and its final output. Returns nothing if the id is unknown (the sequence ended)."""
        sequence = self._sequences.get((connection, sequence_id))
        if sequence is None:
            return []
        num_computed, now = sequence.num_computed, self._clock()
        answer = self._remove(sequence, FinishReason.ABORT, now)
        progress = answer.progress(num_computed)
        events = [answer.abort(now)] if progress is None else [progress, answer.abort(now)]
        return [(connection, event) for event in events]

    def abort_connection(self, connection: int) -> None:
        for key in [key for key in self._sequences if key[0] == connection]:
            self.abort(*key)

    def attach(self, runner: Runner) -> None:
        """Called when the weights have been loaded, with the runner that computes with them."""
        self.runner = runner
        self.is_stalled = False
        now = self._clock()
        for sequence in self._sequences.values():
            sequence.times.model_back_s = now

    def detach(self) -> Runner | None:
        """Called before the weights are unloaded; no step may be in flight. Returns the runner.
        Waiting sequences resume after the next `attach`."""
        assert not self._in_flight, "a step is in flight"
        runner, self.runner = self.runner, None
        now = self._clock()
        for sequence in self._sequences.values():
            sequence.times.model_left_s, sequence.times.model_back_s = now, None
        return runner

    def suspend(self) -> list[Event]:
        """Waits for the steps in flight and preempts all running sequences, which keep their
        tokens. Returns the events of these steps."""
        events = self._collect()
        with self.scheduler.kv.lock:
            self.scheduler.suspend(self._clock())
        return events

    def fail_waiting(self, code: ErrorCode, message: str) -> list[Event]:
        """Fails all waiting sequences, including preempted ones."""
        waiting = [s for s in self._sequences.values() if s.is_waiting]
        return [self._fail(sequence, code, message) for sequence in waiting]

    def fail_first(self, code: ErrorCode, message: str) -> list[Event]:
        """Fails the waiting sequence that would run next."""
        sequence = self.scheduler.policy.first_waiting
        return [] if sequence is None else [self._fail(sequence, code, message)]

    def give_back(self) -> list[Event]:
        """Refuses waiting sequences that have not started, so that other workers can start them."""
        waiting = [s for s in self._sequences.values() if s.is_waiting and not s.is_begun]
        return [self._fail(s, ErrorCode.DRAINING, "the worker is draining") for s in waiting]

    def step(self, *, is_alone: bool = True, is_held: bool = False) -> list[Event]:
        """Launches a step if there is work, and collects earlier steps. Leaves the new step in
        flight only if the engine runs ahead and no other engine uses the device (`is_alone`);
        otherwise the step's time would be counted in another engine's step. A failed step fails
        only its sequences. is_held: if True, admits no waiting sequences."""
        events = self._collect() if self.last_schedule.needs_drain else []
        is_launched, failed = self._launch(is_held or self.runner is None)
        num_ahead = 1 if is_launched and is_alone and self._runs_ahead else 0
        return events + failed + self._collect(num_ahead)

    def _launch(self, is_held: bool) -> tuple[bool, list[Event]]:
        """Launches a step if it can. Returns whether it did, and events of failed sequences."""
        begin = perf_counter_ns()
        start_s = self._clock()
        with self.scheduler.kv.lock:
            failed = self.expire()
            schedule = self.last_schedule = self.scheduler.schedule(start_s, is_held=is_held)
            failed += [self._fail(*failure) for failure in schedule.failed]
            if self.scheduler.policy.is_backlogged:
                late = self.scheduler.intake.refuse_late(start_s)
                failed += [self._refuse(refusal) for refusal in late]
            self.is_stalled = not schedule.items and not self._in_flight
        if not schedule.items or self.runner is None:
            return False, failed
        scheduled, launched_s = perf_counter_ns(), self._clock()
        try:
            step_input = build_step_input(schedule, self._tables)
            build_us = (perf_counter_ns() - scheduled) // 1000
            step = self.runner.launch(step_input)
        except Exception as error:
            with self.scheduler.kv.lock:
                return False, failed + self._fail_step(schedule, error)
        schedule_us = (scheduled - begin) // 1000
        launched = InFlightStep(schedule, step, start_s, launched_s, schedule_us, build_us)
        self._in_flight.append(launched)
        return True, failed

    def _collect(self, num_left: int = 0) -> list[Event]:
        """Collects the results of all steps in flight except the newest `num_left`."""
        events: list[Event] = []
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            outcome = step.wait()
            ended, ended_s = perf_counter_ns(), self._clock()
            new = self._follow(step.schedule, outcome)
            with self.scheduler.kv.lock:
                events += self._complete_step(step, outcome, new, (ended, ended_s))
        return events

    def _follow(self, schedule: Schedule, outcome: StepOutput | Exception) -> list[NewTokens]:
        """Advances the sequences' constraints by their new tokens. Returns each sequence's new and
        forced tokens up to its end, or no tokens if it ended in the meantime."""
        if isinstance(outcome, Exception):
            return []
        new: list[NewTokens] = []
        following: list[tuple[int, Sequence]] = []
        for item, result in zip(schedule.items, outcome.sequences, strict=True):
            sequence, tokens = item.sequence, result.tokens
            if sequence.is_finished or not tokens:
                new.append(NOTHING_NEW)
                continue
            num_drawn, finish_reason = sequence.end_within(tokens)
            if finish_reason is None and sequence.constraint.needs_host_token:
                sequence.constraint.advance(tokens)
                following.append((len(new), sequence))
            new.append(NewTokens(tokens[:num_drawn], num_drawn, finish_reason))
        for index, sequence in following:
            if forced := sequence.constraint.forced():
                tokens = new[index].tokens + forced
                num_tokens, finish_reason = sequence.end_within(tokens)
                new[index] = NewTokens(tokens[:num_tokens], new[index].num_drawn, finish_reason)
        return new

    def _complete_step(
        self,
        step: InFlightStep,
        outcome: StepOutput | Exception,
        new: list[NewTokens],
        end: tuple[int, float],
    ) -> list[Event]:
        """Records a finished step and returns its events. end: time when the step ended, in ns of
        `perf_counter_ns` and in seconds of the clock."""
        schedule = step.schedule
        if isinstance(outcome, Exception):
            return self._fail_step(schedule, outcome)
        self._num_failed_steps = 0
        ended, ended_s = end
        device_s = ended_s - max(step.launched_s, self._ended_s)
        self._ended_s = ended_s
        self.scheduler.record_duration(schedule, device_s, ended_s)
        events = self._apply(schedule, outcome, new, ended_s)
        build_us = step.build_us + outcome.build_us
        update_us = (perf_counter_ns() - ended) // 1000
        host_us = {"schedule": step.schedule_us, "build": build_us, "update": update_us}
        finished = FinishedStep(schedule, outcome, step.start_s, device_s, host_us)
        self._observer.on_step(finished, ended_s)
        return events

    def _sequence(self, connection: int, request: Generate, arrival_s: float) -> Sequence:
        sequence = Sequence(
            connection,
            request,
            arrival_s=arrival_s,
            end_tokens=self._limits.end_tokens,
            block_table=BlockTable(self.scheduler.kv, Tenant(request.tenant, request.weight)),
            layout=self.info.cache_layout,
        )
        if self.runner is None:
            sequence.times.model_left_s = arrival_s
        return sequence

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._answers[sequence] = Answer(sequence)
        generated = sequence.tokens[sequence.num_prompt :]
        sequence.constraint = self._constraints.open(sequence.request, generated)
        self.is_stalled = False
        self.scheduler.add(sequence)

    def _refuse(self, refusal: Refusal) -> Event:
        """Removes the refused sequence if it was queued. Returns its `Failed`."""
        sequence, now = refusal.sequence, self._clock()
        code, retry = ErrorCode.OVERLOADED, (refusal.retry_after_s, refusal.pace_s)
        if self._sequences.get(sequence.key) is sequence:
            answer = self._remove(sequence, code, now)
        else:
            answer = Answer(sequence)
            self._observer.on_end(sequence, code, now)
        return sequence.connection, answer.fail(code, refusal.message, now, *retry)

    def _apply(
        self, schedule: Schedule, output: StepOutput, new: list[NewTokens], now: float
    ) -> list[Event]:
        """Applies a step's results, except those of sequences that ended in the meantime."""
        self.scheduler.update(schedule, [each.num_drawn for each in new])
        events: list[Event] = []
        for item, result, tokens in zip(schedule.items, output.sequences, new, strict=True):
            if not item.sequence.is_finished:
                events += self._apply_result(item, result, tokens, now)
        return events

    def _apply_result(
        self, item: ScheduledSequence, result: SequenceResult, new: NewTokens, now: float
    ) -> list[Event]:
        sequence = item.sequence
        answer = self._answers[sequence]
        events: list[Event] = []
        if result.prompt_logprobs is not None or result.vector is not None:
            answer.add(item.start, result)
        if item.is_prefill and (progress := answer.progress(item.end)) is not None:
            events.append((sequence.connection, progress))
        if result.error is not None:
            return [*events, self._fail_drawing(sequence, result.error)]
        if item.is_sampled:
            return events + self._append(answer, sequence, result, new, now)
        if sequence.request.kind is not OutputKind.GENERATE and item.end == len(sequence.tokens):
            output = answer.finish_prompt(now)
            self._remove(sequence, output.finish_reason or FinishReason.LENGTH, now)
            events.append((sequence.connection, output))
        return events

    def _append(
        self,
        answer: Answer,
        sequence: Sequence,
        result: SequenceResult,
        new: NewTokens,
        now: float,
    ) -> list[Event]:
        if sequence.num_inflight_steps and len(result.tokens) != 1:
            # The next step was launched on the assumption that this step yields one token.
            return [self._fail_drawing(sequence, ErrorCode.INTERNAL)]
        if num_new := len(new.tokens):
            self.num_generated_tokens += num_new
            self._observer.on_tokens(sequence, num_new, now)
        output = answer.append(new.tokens, new.finish_reason, result.logprobs, now)
        if new.finish_reason is not None:
            self._remove(sequence, new.finish_reason, now)
        else:
            self.scheduler.write_tokens(sequence, num_new - new.num_drawn)
        return [] if output is None else [(sequence.connection, output)]

    def _fail_drawing(self, sequence: Sequence, error: ErrorCode) -> Event:
        adapter = "none" if sequence.adapter is None else sequence.adapter.digest
        message = DRAWING_ERRORS[error]
        log.error("%s: model %s, adapter %s", message, self.info.name, adapter)
        return self._fail(sequence, error, message)

    def _remove(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> Answer:
        """Removes a sequence that has ended. Returns its `Answer`, which makes the last message."""
        del self._sequences[sequence.key]
        self.scheduler.remove(sequence)
        self._observer.on_end(sequence, end, now)
        return self._answers.pop(sequence)

    def _fail(self, sequence: Sequence, code: ErrorCode, message: str) -> Event:
        now = self._clock()
        answer = self._remove(sequence, code, now)
        return sequence.connection, answer.fail(code, message, now)

    def _fail_step(self, schedule: Schedule, error: Exception) -> list[Event]:
        if isinstance(error, DeviceFailed):
            raise EngineFailed(str(error)) from error
        message = f"the engine step failed: {type(error).__name__}"
        log.exception("engine step failed", exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps == MAX_FAILED_STEPS:
            raise EngineFailed(f"{MAX_FAILED_STEPS} steps in a row have failed") from error
        failing = [item.sequence for item in schedule.items if not item.sequence.is_finished]
        events = [self._fail(sequence, ErrorCode.INTERNAL, message) for sequence in failing]
        self.scheduler.update(schedule, [0] * len(schedule.items))
        return events
