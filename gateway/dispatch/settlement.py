"""Settles one admitted request exactly once, however it ends: records its usage, and reports it in
metrics, trace and log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter

import msgspec

from gateway import telemetry
from gateway.dispatch.generation import Generation
from gateway.dispatch.run import Run
from gateway.dispatch.sequence import WorkerTimes
from gateway.exceptions import UsageUnavailable, error_type
from gateway.limits.admission import Reservation
from gateway.metering.usage_loader import Status, UsageRecord
from gateway.metering.wal import Batch, WriteAheadLog
from gateway.tracing import Detail, Event, Stage, Value
from telemetry.tallies import Histogram, exemplar
from workers.wire.client import WorkerClient

MAX_CANDIDATES = 8
"""Maximum number of candidate workers that a span lists for one routing decision."""
log = logging.getLogger(__name__)
PICO = 1e-12
"""Dollars in a pico-dollar, the unit of costs."""
Latency = tuple[float, Histogram, Histogram]
"""Seconds, and the two histograms that record them: first loraplex's own histogram, then the
histogram of OpenTelemetry's GenAI conventions."""


class Settlement:
    """End of one admitted request. `settle` must be called exactly once. Before that, `keep` may be
    called to record the usage and wait until it is on disk."""

    def __init__(
        self,
        run: Run,
        generation: Generation,
        reservation: Reservation,
        wal: WriteAheadLog,
    ) -> None:
        self.request_id = run.request_id
        self._run = run
        self._generation = generation
        self._reservation = reservation
        self._wal = wal
        self._batch: Batch | None = None

    async def keep(self, status: Status) -> None:
        """Records the usage and waits until it is on disk. Raises UsageUnavailable."""
        trace = self._run.trace
        trace.enter("usage")
        try:
            await self._record(status).synced()
            trace.leave()
        except OSError as error:
            raise UsageUnavailable("What this request used could not be recorded.") from error

    def settle(self, failure: Exception | None) -> None:
        """Records the usage if it is not recorded yet, unless the request was refused. `failure` is
        the exception that ended the answer, or None if the answer was completed or the client
        disconnected."""
        generation, trace = self._generation, self._run.trace
        if not generation.is_refused:
            self._record(Status.CANCELLED if failure is None else Status.FAILED)
        trace.first_output_at = generation.first_output_at
        outcome = (
            "completed" if generation.is_done else "cancelled" if failure is None else "failed"
        )
        trace.detail(partial(answer_detail, self._run, generation, outcome))
        self._log(outcome, failure)

    def _record(self, status: Status) -> Batch:
        """Records the usage and returns the record's batch, which is written even if it is not
        awaited. Later calls return the same batch and record nothing."""
        if self._batch is None:
            record = self._usage_record(status)
            self._batch = self._wal.append(msgspec.msgpack.encode(record))
            self._count(record)
        return self._batch

    def _usage_record(self, status: Status) -> UsageRecord:
        run, generation, reservation = self._run, self._generation, self._reservation
        usage, first_at, version = generation.usage, generation.first_output_at, run.target.version
        cost, metered_tokens = reservation.cost(usage), reservation.metered(usage)
        return UsageRecord(
            request_id=run.request_id,
            admitted_at=reservation.admitted_at,
            tenant_id=run.caller.tenant.id,
            key_id=run.caller.who.id,
            model=run.target.base.name,
            adapter=version.name if version else None,
            adapter_version=version.version if version else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_ms=None if first_at is None else round((first_at - run.started_at) * 1e3, 3),
            duration_ms=round((time.perf_counter() - run.started_at) * 1e3, 3),
            finish_reasons=generation.finish_reasons,
            worker=generation.worker_id,
            trace_id=run.trace.trace_id,
            status=status,
            gateway=reservation.holder,
            metered_tokens=metered_tokens,
            cost=sum(cost),
            leased=reservation.leased,
            input_cost=cost.input,
            cached_input_cost=cost.cached_input,
            output_cost=cost.output,
        )

    def _count(self, record: UsageRecord) -> None:
        run, version = self._run, self._run.target.version
        labels = record.model, run.caller.service.service_class.value
        latencies = list(_latencies(record))
        run.trace.when_kept(partial(_exemplify, latencies, labels))
        for each in Status:
            telemetry.requests.add(each is record.status, *labels, each.value)
        telemetry.tokens.add(record.prompt_tokens, *labels, "prompt")
        telemetry.tokens.add(record.cached_tokens, *labels, "cached")
        telemetry.tokens.add(record.completion_tokens, *labels, "completion")
        # Value of the label `error.type` of the GenAI conventions. Empty if there was no error.
        error = "_OTHER" if record.status is Status.FAILED else ""
        about = run.operation, telemetry.PROVIDER, record.model, error
        for seconds, histogram, of_genai in latencies:
            histogram.record(seconds, *labels)
            if not error or of_genai is telemetry.server_duration:
                of_genai.record(seconds, *about)
        num_tokens = record.prompt_tokens + record.completion_tokens
        telemetry.tenant_use.add((record.tenant_id,), num_tokens, 1, record.cost * PICO, 0)
        if version is not None:
            place = record.tenant_id, version.name, str(version.version)
            telemetry.adapter_use.add(place, num_tokens, 1)

    def _log(self, outcome: str, failure: Exception | None) -> None:
        """Logs one line for each request, without its prompt or answer."""
        run, generation = self._run, self._generation
        usage, version = generation.usage, run.target.version
        first_at = generation.first_output_at
        ttft_ms = None if first_at is None else round((first_at - run.started_at) * 1e3, 1)
        log.info(
            "answered",
            extra={
                "request_id": run.request_id,
                "trace_id": run.trace.trace_id,
                "tenant": run.caller.tenant.id,
                "tenant_name": run.caller.tenant.name,
                "key_id": run.caller.who.id,
                "address": run.address,
                "model": run.request.model,
                "adapter_version": version.version if version else None,
                "worker": generation.worker_id,
                "outcome": outcome,
                "error": failure and error_type(failure),
                "in_tok": usage.prompt_tokens,
                "out_tok": usage.completion_tokens,
                "finish_reasons": generation.finish_reasons,
                "ttft_ms": ttft_ms,
                "dur_ms": round((time.perf_counter() - run.started_at) * 1e3),
            },
        )


def _latencies(record: UsageRecord) -> Iterator[Latency]:
    duration_s = record.duration_ms / 1e3
    yield duration_s, telemetry.request_duration, telemetry.server_duration
    if record.ttft_ms is not None:
        ttft_s = record.ttft_ms / 1e3
        yield ttft_s, telemetry.time_to_first_token, telemetry.server_first_token
        if record.completion_tokens > 1:
            per_token_s = (duration_s - ttft_s) / (record.completion_tokens - 1)
            yield per_token_s, telemetry.time_per_output_token, telemetry.server_per_token


def _exemplify(
    latencies: list[Latency], labels: tuple[str, str], trace_id: int, span_id: int
) -> None:
    """Makes the request the exemplar of the histogram buckets that count its latencies."""
    now = time.time()
    for seconds, histogram, _ in latencies:
        histogram.exemplify(exemplar(trace_id, span_id, seconds, now), *labels)


def routing_attributes(weighed: Mapping[WorkerClient, float]) -> dict[str, Value]:
    """Returns the span attributes of a routing decision: the candidate workers and their predicted
    seconds, best first."""
    ranked = sorted(weighed.items(), key=itemgetter(1))[:MAX_CANDIDATES]
    return {
        "loraplex.routing.candidates": [worker.instance_id for worker, _ in ranked],
        "loraplex.routing.predicted_s": [seconds for _, seconds in ranked],
    }


def answer_detail(run: Run, generation: Generation, outcome: str) -> Detail:
    """Returns the span details of an answer that has ended."""
    attributes: dict[str, Value] = {
        **_request_attributes(run),
        **_usage_attributes(generation),
        "loraplex.outcome": outcome,
        "loraplex.worker": generation.worker_id,
    }
    return Detail(attributes, _events(generation), _stages(generation))


def _request_attributes(run: Run) -> dict[str, Value]:
    """Returns span attributes of the request. The names that begin with `gen_ai` follow
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/."""
    request, target, caller = run.request, run.target, run.caller
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": run.operation,
        "gen_ai.provider.name": telemetry.PROVIDER,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.presence_penalty": request.presence_penalty,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.choice.count": request.num_choices if request.num_choices > 1 else None,
        "gen_ai.request.stream": request.stream,
        "loraplex.request.id": run.request_id,
        "loraplex.key.id": caller.who.id,
        "loraplex.base_model": target.base.name,
        "loraplex.service_class": run.caller.service.service_class.value,
        "loraplex.prompts": len(run.prompts),
    }
    if (version := target.version) is not None:
        found["loraplex.adapter.name"] = version.name
        found["loraplex.adapter.version"] = version.version
        found["loraplex.adapter.digest"] = version.digest
    return {name: value for name, value in found.items() if value is not None}


def _usage_attributes(generation: Generation) -> dict[str, Value]:
    usage = generation.usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [each or "none" for each in generation.finish_reasons],
    }


def _events(generation: Generation) -> list[Event]:
    """Returns the moves of all sequences to other workers as events. Adds preemptions and adapter
    evictions, but only of the sequence whose worker reported times last."""
    events = [
        Event(
            "resume" if move.num_resumed else "retry",
            move.at,
            {
                "loraplex.worker.from": move.from_worker,
                "loraplex.worker.to": move.to_worker,
                "error.type": move.reason,
                "loraplex.tokens_resumed": move.num_resumed,
            },
        )
        for move in generation.moves
    ]
    if (told := generation.worker_times) is not None:
        worker: dict[str, Value] = {"loraplex.worker": told.worker_id}
        events += [
            Event("preemption", told.sent_at + at_s, worker) for at_s in told.times.preempted_s
        ]
        load = told.times.adapter_load
        if load is not None and load.num_evicted:
            evicted = {**worker, "loraplex.adapters.evicted": load.num_evicted}
            events.append(Event("eviction", told.sent_at + load.copy_begun_s, evicted))
    return events


def _stages(generation: Generation) -> list[Stage]:
    """Returns the stages of the sequence whose worker reported times last. The worker's clock
    differs from the gateway's, so the stages are placed as if the sequence had reached the worker
    at the moment when it was sent."""
    told = generation.worker_times
    if told is None:
        return []
    times, worker = told.times, told.worker_id
    attributes: dict[str, Value] = {"loraplex.worker": worker}
    started_s, first_s, ended_s = times.started_s, times.first_token_s, _ended_s(generation, told)
    bounds = [("queue", 0.0, ended_s if started_s is None else started_s)]
    if started_s is not None:
        bounds.append(("prefill", started_s, ended_s if first_s is None else first_s))
    if first_s is not None:
        bounds.append(("decode", first_s, ended_s))
    if times.model_wait is not None:
        bounds.append(("model_swap", *times.model_wait))
    stages = [
        Stage(name, told.sent_at + begun_s, told.sent_at + end_s, attributes)
        for name, begun_s, end_s in bounds
    ]
    if (load := times.adapter_load) is not None:
        begun_at, ended_at = told.sent_at + load.begun_s, told.sent_at + load.ended_s
        tier: dict[str, Value] = {**attributes, "loraplex.adapter.tier": load.tier}
        stages.append(Stage("adapter_load", begun_at, ended_at, tier))
    return stages


def _ended_s(generation: Generation, told: WorkerTimes) -> float:
    """Returns the seconds from the sequence's arrival at the worker to its end. Uses the gateway's
    clock if the gateway ended the sequence, for example at a stop string, because the worker has
    not reported that end."""
    if told.is_last:
        return told.times.told_s
    return (generation.ended_at or time.perf_counter()) - told.sent_at
