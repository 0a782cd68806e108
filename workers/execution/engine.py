"""Engine of one base model: receives requests, schedules, launches and collects steps, and emits
events. It runs on one thread; adapters load on other threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from memory.accounts import Tenant
from memory.block_table import BlockTable
from ops.commands import Command
from workers.execution.answer import Answer
from workers.execution.observer import FinishedStep, StepObserver
from workers.execution.recompute import CompletedStep, recompute
from workers.execution.step_builder import BlockTables, build_step_input
from workers.execution.step_input import (
    DeviceFailed,
    PendingStep,
    Runner,
    SequenceResult,
    StepOutput,
)
from workers.scheduling.constraint import ConstraintSource
from workers.scheduling.deadlines import Deadlines
from workers.scheduling.policy import Refusal
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
    ErrorCode.INTERNAL: "the engine could not compute the next token",
}

Event = tuple[int, SequenceOutput | PromptProgress | Failed]
"""Connection number, and the output, progress or failure of one of that connection's sequences."""
Drain = Callable[[], list[Event]]


class NewTokens(NamedTuple):
    """New tokens of a sequence: `num_drawn` tokens that the step drew, then tokens that its
    constraint forces. finish_reason: why the tokens end the sequence, or None if they do not."""

    tokens: list[int]
    num_drawn: int
    finish_reason: FinishReason | None


NOTHING_NEW = NewTokens([], 0, None)


def advance_constraints(schedule: Schedule, output: StepOutput) -> list[NewTokens]:
    """Advances the sequences' constraints by the tokens that the step drew. Returns each sequence's
    drawn and forced tokens up to its end, or no tokens if it ended in the meantime. Called without
    the memory lock, because constraints may take long."""
    new: list[NewTokens] = []
    following: list[tuple[int, Sequence]] = []
    for item, result in zip(schedule.items, output.sequences, strict=True):
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


class EngineFailed(Exception):
    """Raised when steps keep failing, or when the device may still use memory that is to be reused.
    The process must exit, because a worker that fails requests fast attracts ever more requests."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Launched step whose result is not collected yet. Times are seconds of the engine's clock."""

    schedule: Schedule
    step: PendingStep
    start_s: float
    launched_s: float
    host_us: dict[str, int]
    """Microseconds of host work so far, by part (see `FinishedStep`)."""

    def wait(self) -> StepOutput | Exception:
        """Waits for the step and returns its result, or the exception that it raised."""
        try:
            return self.step.result()
        except Exception as error:
            return error


class Engine:
    """Continuous batching for one model. Every accepted `Generate` ends with a finish reason or a
    `Failed`.

    `step`, `suspend` and `collect` are called without the memory lock. They acquire it, but not
    while they wait for the device or for grammars, and raise EngineFailed. All other methods except
    `refusal` are called with the lock held.

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
        self._commands: list[Command] = []
        """Commands of scheduled steps that no launched step has applied."""
        self._in_flight: deque[InFlightStep] = deque()
        self._ended_s = 0.0
        """Time when the last step ended."""
        self._num_failed_steps = 0
        """Number of consecutive failed steps."""
        self._deadlines = Deadlines()
        self._answers: dict[tuple[int, int], Answer] = {}
        """Answers of all sequences that have not ended, by `Sequence.key`."""
        self.is_stalled = True
        """Whether the last step found nothing to run: no work, or all work waits for adapters."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def weight(self) -> int:
        """Sum of the weights of all tenants with work in this engine."""
        return self.scheduler.policy.status.weight

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences, including preempted ones, the one that has waited longest first."""
        return list(self.scheduler.waiting)

    def refusal(self, request: Generate) -> tuple[ErrorCode, str] | None:
        """Returns why the request can never run, or None if it can run. Needs no lock."""
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
        """Queues the request if the queue has room or can make room. Called only if `refusal`
        returned None. Returns a `Failed` of this request if it is refused, or of each queued
        request that is refused to make room for it (see `SchedulingPolicy.refuse`)."""
        if (connection, request.id) in self._answers:
            message = f"sequence id {request.id} is in use"
            return [(connection, Failed(request.id, ErrorCode.INVALID, message))]
        sequence = self._sequence(connection, request, arrival_s)
        refusals = self.scheduler.policy.refuse([sequence], self._clock())
        if not any(refusal.sequence is sequence for refusal in refusals):
            self.scheduler.load_adapter(sequence.adapter, sequence.block_table.tenant)
            self._add(sequence)
        return self._refuse(refusals)

    def expire(self) -> list[Event]:
        """Fails waiting sequences whose deadline for the first token has passed."""
        expired = self._deadlines.pop_passed(self._clock())
        message = "its time was over before its prompt could begin"
        return self.fail(expired, ErrorCode.EXPIRED, message)

    def fail(self, sequences: Iterable[Sequence], code: ErrorCode, message: str) -> list[Event]:
        """Ends the sequences, and returns a `Failed` for each."""
        return [self._fail(sequence, code, message) for sequence in sequences]

    def abort(self, connection: int, sequence_id: int) -> list[Event]:
        """Removes the sequence at once. Returns its last prompt progress, which includes steps in
        flight, and its final output, or no events if the sequence has already ended."""
        answer = self._answers.get((connection, sequence_id))
        if answer is None:
            return []
        sequence, reason, now = answer.sequence, FinishReason.ABORT, self._clock()
        progress = answer.progress(sequence.num_computed)
        self._end(sequence, reason, now)
        output = SequenceOutput(sequence_id, [], finish_reason=reason, times=sequence.traced(now))
        return [(connection, event) for event in (progress, output) if event is not None]

    def abort_connection(self, connection: int) -> None:
        for key in [key for key in self._answers if key[0] == connection]:
            self.abort(*key)

    def set_runner(self, runner: Runner | None) -> None:
        """Sets the runner once the weights are loaded, or None before they are unloaded. No step
        may be in flight. Without a runner, sequences wait until the next one is set."""
        assert not self._in_flight, "a step is in flight"
        self.runner = runner
        self.is_stalled &= runner is None
        now = self._clock()
        for answer in self._answers.values():
            answer.sequence.times.record_model(now, is_loaded=runner is not None)

    def suspend(self) -> list[Event]:
        """Waits for the steps in flight and preempts all running sequences, which keep their
        tokens. Returns the events of these steps."""
        events = self.collect()
        with self.scheduler.kv.lock:
            self.scheduler.suspend(self._clock())
        return events

    def step(self, *, is_held: bool = False, drain: Drain | None = None) -> list[Event]:
        """Launches a step if there is work, and collects earlier steps. Leaves the new step in
        flight only if the engine runs ahead and no other engine uses the device, because another
        engine's step would otherwise be charged for the time of this one. A failed step fails only
        its own sequences. is_held: if True, no waiting sequence is admitted. drain: function that
        collects the other engines' steps before a launch, or None if no other engine has work."""
        events = self.collect() if self.last_schedule.needs_drain else []
        is_launched = self._launch(is_held or self.runner is None, events, drain)
        num_ahead = 1 if is_launched and drain is None and self._runs_ahead else 0
        return events + self.collect(num_ahead)

    def _launch(self, is_held: bool, events: list[Event], drain: Drain | None) -> bool:
        """Launches a step if there is work. Returns whether it was launched and may stay in flight.
        Appends the failures of sequences to `events`."""
        begin, start_s = perf_counter_ns(), self._clock()
        scheduler = self.scheduler
        with scheduler.kv.lock:
            events += self.expire()
            schedule = self.last_schedule = scheduler.schedule(start_s, is_held=is_held)
            events += [self._fail(*failure) for failure in schedule.failed]
            events += self._refuse(scheduler.policy.refuse([], start_s))
            self.is_stalled = not schedule.items and not self._in_flight
            if schedule.items:
                self._commands += scheduler.commands.take()
        if not schedule.items or self.runner is None:
            return False
        schedule_ns = perf_counter_ns() - begin
        events += drain() if drain is not None else []
        launched_s, build_ns, is_launched = self._clock(), 0, True
        try:
            step, build_ns = self._submit(schedule.items)
        except Exception as error:
            # Steps are computed in order, because each may read the tokens that the last one drew.
            events += self.collect()
            step, is_launched = CompletedStep(self._recompute(schedule, error)), False
        host_us = {"schedule": schedule_ns // 1000, "build": build_ns // 1000}
        self._in_flight.append(InFlightStep(schedule, step, start_s, launched_s, host_us))
        return is_launched

    def _submit(self, items: list[ScheduledSequence]) -> tuple[PendingStep, int]:
        """Launches a step with the commands that no launched step has applied. Returns the step,
        and the nanoseconds in which its input was built."""
        assert self.runner is not None
        begin = perf_counter_ns()
        step = build_step_input(items, self._tables, self._commands)
        build_ns = perf_counter_ns() - begin
        launched = self.runner.launch(step)
        self._commands = []
        return launched, build_ns

    def collect(self, num_left: int = 0) -> list[Event]:
        """Applies the results of all steps in flight, except the newest `num_left`."""
        events: list[Event] = []
        lock = self.scheduler.kv.lock
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            outcome = step.wait()
            ended, ended_s = perf_counter_ns(), self._clock()
            if isinstance(outcome, Exception):
                outcome = self._recompute(step.schedule, outcome)
            new = advance_constraints(step.schedule, outcome)
            with lock:
                events += self._complete_step(step, outcome, new, (ended, ended_s))
        return events

    def _complete_step(
        self, step: InFlightStep, output: StepOutput, new: list[NewTokens], end: tuple[int, float]
    ) -> list[Event]:
        """Records a finished step and returns its events. Discards the results of sequences that
        ended in the meantime. end: time when the step ended, in ns of `perf_counter_ns` and in
        seconds of the clock."""
        if any(result.error is not ErrorCode.INTERNAL for result in output.sequences):
            self._num_failed_steps = 0
        schedule, (ended, ended_s) = step.schedule, end
        device_s = ended_s - max(step.launched_s, self._ended_s)
        self._ended_s = ended_s
        self.scheduler.record_duration(schedule, device_s, ended_s)
        results = zip(output.sequences, new, strict=True)
        self.scheduler.update(schedule, [None if r.error else n.num_drawn for r, n in results])
        events: list[Event] = []
        for item, result, tokens in zip(schedule.items, output.sequences, new, strict=True):
            if not item.sequence.is_finished:
                events += self._apply(item, result, tokens, ended_s)
        host_us = step.host_us
        host_us["build"] += output.build_us
        host_us["update"] = (perf_counter_ns() - ended) // 1000
        finished = FinishedStep(schedule, output, step.start_s, device_s, host_us)
        self._observer.on_step(finished, ended_s)
        return events

    def _apply(
        self, item: ScheduledSequence, result: SequenceResult, new: NewTokens, now: float
    ) -> list[Event]:
        """Applies a step's results for one sequence."""
        sequence, error, events = item.sequence, result.error, list[Event]()
        answer, connection = self._answers[sequence.key], sequence.connection
        if result.prompt_logprobs is not None or result.vector is not None:
            answer.add(item.start, result)
        if item.is_prefill and (progress := answer.progress(item.end)) is not None:
            events.append((connection, progress))
        if item.is_sampled and sequence.num_inflight_steps and len(result.tokens) != 1:
            # The next step was launched on the assumption that this step yields one token.
            error = error or ErrorCode.INTERNAL
        if error is not None:
            adapter = "none" if sequence.adapter is None else sequence.adapter.digest
            message = DRAWING_ERRORS[error]
            log.error("%s: model %s, adapter %s", message, self.info.name, adapter)
            return [*events, self._fail(sequence, error, message)]
        output = None
        if item.is_sampled:
            if num_new := len(new.tokens):
                self._observer.on_tokens(sequence, num_new, now)
                output = answer.append(new.tokens, new.finish_reason, result.logprobs, now)
            if new.finish_reason is None:
                self.scheduler.write_tokens(sequence, num_new - new.num_drawn)
        elif sequence.request.kind is not OutputKind.GENERATE and item.end == len(sequence.tokens):
            output = answer.finish_prompt(now)
        if output is not None:
            events.append((connection, output))
            if output.finish_reason is not None:
                self._end(sequence, output.finish_reason, now)
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
            sequence.times.record_model(arrival_s, is_loaded=False)
        return sequence

    def _add(self, sequence: Sequence) -> None:
        self._answers[sequence.key] = Answer(sequence)
        generated = sequence.tokens[sequence.num_prompt :]
        sequence.constraint = self._constraints.open(sequence.request, generated)
        self.is_stalled = False
        self._deadlines.add(sequence, len(self._answers))
        self.scheduler.add(sequence)

    def _refuse(self, refusals: Iterable[Refusal]) -> list[Event]:
        """Ends the refused sequences, queued or not. Returns a `Failed` for each."""
        code = ErrorCode.OVERLOADED
        return [
            self._fail(r.sequence, code, r.message, r.retry_after_s, r.pace_s) for r in refusals
        ]

    def _fail(self, sequence: Sequence, code: ErrorCode, message: str, *retry: float) -> Event:
        """Ends the sequence, and returns its `Failed`. retry: its `retry_after_s` and `pace_s`."""
        now = self._clock()
        self._end(sequence, code, now)
        failed = Failed(sequence.request.id, code, message, *retry, times=sequence.traced(now))
        return sequence.connection, failed

    def _end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        """Reports that a sequence has ended, and removes it if it was queued."""
        if self._answers.pop(sequence.key, None) is not None:
            self.scheduler.remove(sequence)
        self._observer.on_end(sequence, end, now)

    def _recompute(self, schedule: Schedule, error: Exception) -> StepOutput:
        """Computes a failed step again, so that only the sequences that cause the failure fail.
        Raises EngineFailed if the device may still use the step's memory, or if too many steps have
        failed. Called without the lock."""
        log.error("engine step failed", exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps == MAX_FAILED_STEPS:
            raise EngineFailed(f"{MAX_FAILED_STEPS} steps in a row have failed") from error
        try:
            results = recompute(schedule.items, error, lambda items: self._submit(items)[0])
        except DeviceFailed as failure:
            raise EngineFailed(str(failure)) from failure
        return StepOutput(results)
