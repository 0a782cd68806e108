"""Settles one admitted request exactly once, however it ends: records its usage, settles its
limits, and reports it in metrics, trace and log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial

import msgspec

from gateway import telemetry
from gateway.dispatch.answer_trace import answer_detail
from gateway.dispatch.generation import Generation
from gateway.dispatch.in_flight import InFlightRequest
from gateway.dispatch.run import Run
from gateway.exceptions import UsageUnavailable, error_type
from gateway.limits.admission import Admission, Reservation
from gateway.metering.usage import Status, UsageRecord
from gateway.metering.wal import Batch, WriteAheadLog
from telemetry.tallies import Exemplar, Histogram

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
        *,
        wal: WriteAheadLog,
        admission: Admission,
        in_flight: InFlightRequest,
    ) -> None:
        self.request_id = run.request_id
        self._run = run
        self._generation = generation
        self._reservation = reservation
        self._wal = wal
        self._admission = admission
        self._in_flight = in_flight
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
        """Records the usage if it is not recorded yet, unless the request was refused, and releases
        everything that the request holds. `failure` is the exception that ended the answer, or None
        if the answer was completed or the client disconnected."""
        generation, trace = self._generation, self._run.trace
        if not generation.is_refused:
            self._record(Status.CANCELLED if failure is None else Status.FAILED)
        self._admission.settle(self._reservation, generation.usage)
        self._in_flight.end(failure, generation.first_output_at)
        trace.first_output_at = generation.first_output_at
        if failure is not None:
            trace.fail(error_type(failure))
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
        cost = reservation.cost(usage)
        return UsageRecord(
            request_id=run.request_id,
            admitted_at=reservation.admitted_at,
            tenant_id=run.caller.tenant.id,
            key_id=run.caller.key.id,
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
            metered_tokens=reservation.metered(usage),
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
                "key_id": run.caller.key.id,
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
        histogram.exemplify(Exemplar(trace_id, span_id, seconds, now), *labels)
