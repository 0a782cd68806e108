"""One base model at work: receive, schedule, launch, collect, update, emit. One thread, beside
which adapters load."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from memory.accounts import Tenant
from memory.block_table import BlockTable
from memory.errors import IntegrityError
from memory.kv_cache import KVCache
from workers.execution.step_ring import StepRing
from workers.scheduling.demand import Demand
from workers.scheduling.queue_limits import Refusal
from workers.scheduling.schedule import PendingStep, Schedule, ScheduledSequence, StepResult
from workers.scheduling.scheduler import EXPIRED, Scheduler
from workers.scheduling.sequence import Sequence, SequenceStatus
from workers.scheduling.step_cost import RecentRatio
from workers.wire.prefix_index import changed_pages
from workers.wire.protocol import (
    AdapterRef,
    AdapterStatus,
    CachedPages,
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ModelInfo,
    ModelStatus,
    PromptProgress,
    SequenceOutput,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from adapters.pool.pool import AdapterPool

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""In a row: then it is not the requests."""

Event = tuple[int, SequenceOutput | PromptProgress | Failed]
"""(connection, what happened to one of its sequences)."""


class EngineFailed(Exception):
    """No step succeeds any more, as after an illegal access on a GPU: the process is to end, or it
    would draw ever more requests by failing them so soon."""


class Runner(Protocol):
    """Computes a schedule: `ModelRunner`, or a stand-in without tensors."""

    def launch(self, schedule: Schedule) -> PendingStep:
        """Steps are computed in the order of their launch. The scheduled sequences keep their
        pages, rows and adapters until the result was taken."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and is not collected. Times are of the engine's clock."""

    schedule: Schedule
    step: PendingStep
    start_s: float
    launched_s: float
    schedule_us: int

    def land(self) -> StepResult | Exception:
        """Waits for its end."""
        try:
            return self.step.result()
        except Exception as error:
            return error


class Engine:
    """Continuous batching for one model. Every accepted `Generate` ends in a finish or in a
    `Failed`.

    `step` takes the lock of the memory, but not while it computes; all else is called with it. It
    raises EngineFailed.

    Where the device works beside the host (`runs_ahead`) the next step is scheduled and launched
    while one is in flight, as if all its sequences went on; what it computes of those that do not
    is discarded. Tokens stay on the device from step to step, so the host is late for none.

        host    schedule 1 | schedule 2 | collect 1, schedule 3 | collect 2, schedule 4 | ...
        device             | step 1 ............| step 2 ...............| step 3 ...
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        runner: Runner | None,
        kv: KVCache,
        pool: AdapterPool,
        ring: StepRing,
        *,
        vocab_size: int,
        end_tokens: frozenset[int],
        clock: Callable[[], float],
        runs_ahead: bool = False,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        """None while the weights are not on the device: all else goes on."""
        self.is_held = False
        """Nobody who waits is admitted."""
        self._kv = kv
        self._pool = pool
        self._ring = ring
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._clock = clock
        self._runs_ahead = runs_ahead
        self._flights: deque[Flight] = deque()
        self._num_failed_steps = 0
        """In a row."""
        self._landed_s = 0.0
        """When the last step was collected."""
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._kept: set[str] = set()
        self._prefill_rate, self._decode_steps = RecentRatio(), RecentRatio()
        """Rows a second of steps that are mostly prompts; seconds a step of those without."""
        self.num_generated_tokens = 0
        self.num_integrity_failures = 0
        self.is_stalled = True
        """The last step found nothing that could run: idle, or waiting for adapters."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def weight(self) -> int:
        """Of all tenants with work here."""
        return self.scheduler.weight

    def submit(self, connection: int, request: Generate) -> Failed | None:
        """Queues the request, however full the queue is, or says why it can never run."""
        sequence = self._sequence(connection, request)
        if (refusal := self._refusal(sequence)) is not None:
            return Failed(request.id, *refusal)
        self._add(sequence)
        return None

    def offer(self, connection: int, request: Generate) -> list[Event]:
        """Queues the request if the queue has room, or makes room. Returns who is refused for it:
        itself, or others that fill more than their share."""
        sequence = self._sequence(connection, request)
        if (refusal := self._refusal(sequence)) is not None:
            return [(connection, Failed(request.id, *refusal))]
        refusals = self.scheduler.refuse_for(sequence, self._clock())
        if not any(refusal.sequence is sequence for refusal in refusals):
            self.scheduler.expect(sequence)
            self._add(sequence)
        return [self._refuse(refusal) for refusal in refusals]

    def expire(self) -> list[Event]:
        """Drops what waits for a first token that nobody wants any more."""
        expired = self.scheduler.expire(self._clock())
        return [self._fail(sequence, ErrorCode.EXPIRED, EXPIRED) for sequence in expired]

    def abort(self, connection: int, sequence_id: int) -> list[Event]:
        """Frees the sequence at once. Returns its end, and before that how far its prompt has come
        with the steps in flight. Nothing for an unknown id: its sequence has ended."""
        sequence = self._sequences.pop((connection, sequence_id), None)
        if sequence is None:
            return []
        events = _progress(sequence, sequence.num_computed)
        self.scheduler.remove(sequence)
        end = SequenceOutput(id=sequence_id, tokens=[], finish_reason=FinishReason.ABORT)
        return [*events, (connection, end)]

    def abort_connection(self, connection: int) -> None:
        for key in [key for key in self._sequences if key[0] == connection]:
            self.abort(*key)

    @property
    def demand(self) -> Demand:
        """What it asks of the device."""
        scheduler = self.scheduler
        num_extents = -(-scheduler.num_pages_wanted // self._kv.pool.pages_per_extent)
        return Demand(
            len(scheduler.running), scheduler.num_waiting, num_extents, scheduler.is_short
        )

    def attach(self, runner: Runner) -> None:
        """The weights have come."""
        self.runner = runner
        self.is_stalled = False

    def detach(self) -> Runner | None:
        """The weights leave; nothing may run. What waits goes on when they are back."""
        assert not self._flights, "a step is in flight"
        runner, self.runner = self.runner, None
        return runner

    def suspend(self) -> list[Event]:
        """Everything that runs waits again and keeps its tokens, those in flight too."""
        events: list[Event] = []
        while self._flights:
            flight = self._flights.popleft()
            events += self._take(flight, flight.land())
        self.scheduler.suspend()
        return events

    def fail_waiting(self, code: ErrorCode, message: str) -> list[Event]:
        """All that waits, whether it has begun or not."""
        waiting = [s for s in self._sequences.values() if s.status is SequenceStatus.WAITING]
        for sequence in waiting:
            self.scheduler.remove(sequence)
        return [self._fail(sequence, code, message) for sequence in waiting]

    def fail_first(self, code: ErrorCode, message: str) -> list[Event]:
        """The one that would be the next to run."""
        sequence = self.scheduler.first_waiting
        if sequence is None:
            return []
        self.scheduler.remove(sequence)
        return [self._fail(sequence, code, message)]

    def give_back(self) -> list[Event]:
        """Refuses what waits and has not begun: another worker may begin it sooner."""
        waiting = [
            sequence
            for sequence in self._sequences.values()
            if sequence.status is SequenceStatus.WAITING and not sequence.is_begun
        ]
        for sequence in waiting:
            self.scheduler.remove(sequence)
        return [self._fail(s, ErrorCode.DRAINING, "the worker is draining") for s in waiting]

    def status(self) -> ModelStatus:
        scheduler, kv = self.scheduler, self._kv
        return ModelStatus(
            digest=self.info.digest,
            name=self.info.name,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            pages_total=kv.num_total,
            pages_free=kv.num_free - kv.num_cached,
            pages_cached=kv.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=scheduler.num_queried_tokens,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            num_adapter_evictions=self._pool.num_evictions,
            num_integrity_failures=self.num_integrity_failures,
            max_num_seqs=scheduler.max_num_seqs,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            prefill_tokens_per_s=self._prefill_rate.value,
            decode_step_s=self._decode_steps.value,
        )

    def adapter_status(self) -> list[AdapterStatus]:
        return [
            AdapterStatus(
                a.digest,
                a.tier,
                a.num_bytes,
                a.leases,
                a.pinned,
                "" if a.fault is None else a.fault.code,
                "" if a.fault is None else str(a.fault),
            )
            for a in self._pool.status()
        ]

    def cached_pages(self) -> Iterator[CachedPages]:
        """What came into the prefix cache and left it since the last call."""
        cache = self._kv.prefix_cache
        changes = cache.journal.take()
        if changes is None:
            return changed_pages(self.info.digest, cache.keys, (), is_whole=True)
        return changed_pages(self.info.digest, *changes)

    def prefetch(self, adapter: AdapterRef) -> None:
        self._pool.prefetch(adapter)

    @property
    def is_loading(self) -> bool:
        return self._pool.is_loading

    def check_integrity(self) -> None:
        """Every page, run and slot is in exactly one state; if not, it is logged and counted."""
        holders = [*self.scheduler.running, *self.scheduler.leaving]
        try:
            self._kv.check_integrity([p for s in holders for p in s.block_table.held_pages])
            self._pool.check_integrity()
        except IntegrityError:
            self.num_integrity_failures += 1
            log.exception("the memory of %s contradicts itself", self.info.name)

    def keep(self, adapters: Iterable[AdapterRef]) -> None:
        """Pins these adapters and no others."""
        wanted = {adapter.digest: adapter for adapter in adapters}
        for digest in self._kept - wanted.keys():
            self._pool.unpin(digest)
        for adapter in wanted.values():
            self._pool.pin(adapter)
        self._kept = set(wanted)

    def step(self, *, is_alone: bool = True) -> list[Event]:
        """Launches a step if anything fits and collects those before it; itself too, unless it may
        be ahead: the device does nothing else (`is_alone`), or else one engine's step would count
        as time of another's. A step that fails fails its own sequences and no others."""
        events = self._collect() if self.scheduler.is_stuck else []
        is_launched, failed = self._launch()
        num_ahead = 1 if is_launched and is_alone and self._runs_ahead else 0
        return events + failed + self._collect(num_ahead)

    def _launch(self) -> tuple[bool, list[Event]]:
        """Whether there is a step more in flight, and who fails."""
        begin = perf_counter_ns()
        start_s = self._clock()
        with self._kv.lock:
            self._pool.poll()
            self.scheduler.is_held = self.is_held or self.runner is None
            schedule = self.scheduler.schedule(start_s)
            failed = [self._fail(*failure) for failure in schedule.failed]
            self.is_stalled = not schedule.items and not self._flights
        if not schedule.items or self.runner is None:
            return False, failed
        schedule_us, launched_s = (perf_counter_ns() - begin) // 1000, self._clock()
        try:
            step = self.runner.launch(schedule)
        except Exception as error:
            with self._kv.lock:
                return False, failed + self._fail_step(schedule, error)
        self._flights.append(Flight(schedule, step, start_s, launched_s, schedule_us))
        return True, failed

    def _collect(self, num_left: int = 0) -> list[Event]:
        """Takes what was launched, but for the last `num_left` steps."""
        events: list[Event] = []
        while len(self._flights) > num_left:
            flight = self._flights.popleft()
            outcome = flight.land()
            with self._kv.lock:
                events += self._take(flight, outcome)
        return events

    def _take(self, flight: Flight, outcome: StepResult | Exception) -> list[Event]:
        """The step has ended."""
        schedule = flight.schedule
        if isinstance(outcome, Exception):
            return self._fail_step(schedule, outcome)
        self._num_failed_steps = 0
        landed, landed_s = perf_counter_ns(), self._clock()
        num_prefill = sum(item.num_tokens for item in schedule.items if item.is_prefill)
        begin_s = max(flight.launched_s, self._landed_s)
        self._note_step(schedule, num_prefill, landed_s - begin_s)
        self._landed_s = landed_s
        events = self._update(schedule, outcome)
        self._ring.append(
            start_s=flight.start_s,
            num_rows=schedule.num_tokens,
            num_sequences=len(schedule.items),
            num_prefill_tokens=num_prefill,
            num_sampled=len(outcome.tokens),
            num_adapters=len({item.slot for item in schedule.items if item.slot >= 0}),
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            num_free_pages=self.scheduler.num_free_pages,
            num_preempted=schedule.num_preempted,
            schedule_us=flight.schedule_us,
            build_us=outcome.build_us,
            forward_us=outcome.forward_us,
            sample_us=outcome.sample_us,
            update_us=(perf_counter_ns() - landed) // 1000,
        )
        return events

    def _sequence(self, connection: int, request: Generate) -> Sequence:
        return Sequence(
            connection,
            request,
            arrival_s=self._clock(),
            end_tokens=self._end_tokens,
            block_table=BlockTable(self._kv, Tenant(request.tenant, request.weight)),
            layout=self.info.cache_layout,
        )

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self.is_stalled = False
        self.scheduler.add(sequence)

    def _refuse(self, refusal: Refusal) -> Event:
        """Whether it was queued before or not."""
        sequence = refusal.sequence
        if self._sequences.get(sequence.key) is sequence:
            self._forget(sequence)
        failed = Failed(
            sequence.request.id,
            ErrorCode.OVERLOADED,
            refusal.message,
            refusal.retry_after_s,
            refusal.pace_s,
        )
        return sequence.connection, failed

    def _refusal(self, sequence: Sequence) -> tuple[ErrorCode, str] | None:
        params, num_resumed = sequence.params, sequence.request.num_resumed
        if sequence.key in self._sequences:
            return ErrorCode.INVALID, f"sequence id {sequence.request.id} is in use"
        if sequence.request.weight < 1:
            return ErrorCode.INVALID, "the weight must be at least 1"
        if sequence.request.stream_interval < 1:
            return ErrorCode.INVALID, "the stream interval must be at least 1"
        if not sequence.tokens:
            return ErrorCode.INVALID, "the prompt is empty"
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < self._vocab_size:
            return ErrorCode.INVALID, f"token ids must lie in 0..{self._vocab_size - 1}"
        if any(not 0 <= token < self._vocab_size for token in params.logit_bias or ()):
            return ErrorCode.INVALID, f"logit_bias ids must lie in 0..{self._vocab_size - 1}"
        if not 0 <= num_resumed < len(sequence.tokens):
            return ErrorCode.INVALID, "num_resumed must leave a prompt"
        if not 0 <= sequence.request.activation < sequence.num_prompt:
            return ErrorCode.INVALID, "the adapter's activation must lie in the prompt"
        if params.max_tokens < (0 if params.prompt_logprobs is not None else 1):
            return ErrorCode.INVALID, "max_tokens must be at least 1 (0 with prompt_logprobs)"
        if num_resumed and (refusal := _resumption_refusal(sequence)) is not None:
            return ErrorCode.INVALID, refusal
        if sequence.max_len > self.info.max_model_len:
            return ErrorCode.PROMPT_TOO_LONG, (
                f"{sequence.num_prompt} prompt tokens and {params.max_tokens} to generate exceed "
                f"the model's {self.info.max_model_len}"
            )
        return self.scheduler.refusal(sequence)

    def _note_step(self, schedule: Schedule, num_prefill: int, seconds: float) -> None:
        """So long did it take."""
        num_rows = schedule.num_tokens
        self.scheduler.step_time.note(num_rows, schedule.num_attended, seconds)
        if 2 * num_prefill > num_rows:
            self._kv.note_prefill(num_rows, seconds)
            self._prefill_rate.note(num_rows, seconds)
        elif num_prefill == 0:
            self._decode_steps.note(seconds, 1)

    def _update(self, schedule: Schedule, result: StepResult) -> list[Event]:
        """Sequences that ended while the step was in flight have no part in it."""
        self.scheduler.update(schedule)
        events: list[Event] = []
        for item in schedule.items:
            sequence = item.sequence
            if sequence.is_finished:
                continue
            scored = result.prompt_logprobs.get(sequence.key)
            if scored is not None:
                # NOTE: a preempted sequence is scored again from its start.
                sequence.prompt_logprobs[item.start :] = scored
            if item.is_prefill:
                events += _progress(sequence, item.end)
        drawn = zip(schedule.sampled, result.tokens, result.logprobs, strict=True)
        for item, token, logprobs in drawn:
            if item.sequence.is_finished:
                continue
            if token < 0:
                events.append(self._fail_drawing(item.sequence))
            else:
                events += self._append(item.sequence, token, logprobs)
        return events + [
            self._finish_prompt(item.sequence)
            for item in schedule.items
            if _ends_unsampled(item) and not item.sequence.is_finished
        ]

    def _append(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> list[Event]:
        self.num_generated_tokens += 1
        output = sequence.append(token, logprobs, self._clock())
        if output is None:
            return []
        if output.finish_reason is not None:
            self._forget(sequence)
        return [(sequence.connection, output)]

    def _fail_drawing(self, sequence: Sequence) -> Event:
        adapter = "none" if sequence.adapter is None else sequence.adapter.digest
        log.error("NaN among the logits of %s, adapter %s", self.info.name, adapter)
        self.scheduler.remove(sequence)
        return self._fail(sequence, ErrorCode.LOGITS_NAN, "the model's logits are not numbers")

    def _finish_prompt(self, sequence: Sequence) -> Event:
        self._forget(sequence)
        return sequence.connection, SequenceOutput(
            id=sequence.request.id,
            tokens=[],
            prompt_logprobs=sequence.prompt_logprobs,
            finish_reason=FinishReason.LENGTH,
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self.scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, code: ErrorCode, message: str) -> Event:
        del self._sequences[sequence.key]
        return sequence.connection, Failed(sequence.request.id, code, message)

    def _fail_step(self, schedule: Schedule, error: Exception) -> list[Event]:
        message = f"the engine step failed: {type(error).__name__}"
        log.exception("engine step failed", exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps == MAX_FAILED_STEPS:
            raise EngineFailed(f"{MAX_FAILED_STEPS} steps in a row have failed") from error
        events: list[Event] = []
        for item in schedule.items:
            if not item.sequence.is_finished:
                self.scheduler.remove(item.sequence)
                events.append(self._fail(item.sequence, ErrorCode.INTERNAL, message))
        self.scheduler.update(schedule)
        return events


def _resumption_refusal(sequence: Sequence) -> str | None:
    """Why nothing of the sequence is left to generate here."""
    resumed = sequence.tokens[sequence.num_prompt :]
    if len(resumed) >= sequence.params.max_tokens:
        return "num_resumed must be less than max_tokens"
    if not sequence.end_tokens.isdisjoint(resumed):
        return "the resumed tokens hold an end token"
    if sequence.params.prompt_logprobs is not None:
        return "prompt_logprobs come with the first token: a resumed sequence has none"
    return None


def _progress(sequence: Sequence, num_computed: int) -> list[Event]:
    """What is to be told when so many of the sequence's tokens are computed: nothing, if its prompt
    was that far before."""
    num_positions = min(num_computed, sequence.num_prompt)
    if num_positions <= sequence.num_reached:
        return []
    sequence.num_reached = num_positions
    progress = PromptProgress(sequence.request.id, num_positions, sequence.num_cached)
    return [(sequence.connection, progress)]


def _ends_unsampled(item: ScheduledSequence) -> bool:
    sequence = item.sequence
    return sequence.params.max_tokens == 0 and item.end == len(sequence.tokens)
