"""Records the usage of one request exactly once, however the request ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from gateway import telemetry
from gateway.dispatch.generation import Generation
from gateway.dispatch.sequences import Call, operation
from gateway.exceptions import UsageUnavailable
from gateway.limits.admission import Reservation
from gateway.metering.usage import Status, UsageRecord, UsageRecorder
from gateway.metering.wal import Batch
from telemetry.tallies import Exemplar, Histogram

PICO = 1e-12
"""Dollars in a pico-dollar, the unit of costs."""

Latency = tuple[float, Histogram, Histogram]
"""Seconds, and the two histograms that count them: loraplex's own, and the one of OpenTelemetry's
GenAI conventions."""


class RequestUsage:
    """Usage record of one admitted request. Only the first call of `record` counts."""

    def __init__(
        self, recorder: UsageRecorder, call: Call, reservation: Reservation, started_at: float
    ) -> None:
        """`started_at` is a time of time.perf_counter()."""
        self._recorder = recorder
        self._call = call
        self._reservation = reservation
        self._started_at = started_at
        self._batch: Batch | None = None

    @property
    def request_id(self) -> str:
        return self._call.request_id

    def record(self, generation: Generation, status: Status) -> Batch:
        """Records the usage and returns the record's batch. The batch is written even if it is not
        awaited."""
        if self._batch is None:
            record = self._made(generation, status)
            self._batch = self._recorder.append(record)
            self._count(record)
        return self._batch

    async def keep(self, generation: Generation, status: Status) -> None:
        """Records the usage and waits until it is on disk. Raises UsageUnavailable."""
        trace = self._call.trace
        trace.enter("usage")
        try:
            await self.record(generation, status).synced()
            trace.leave()
        except OSError as error:
            raise UsageUnavailable("What this request used could not be recorded.") from error

    def _count(self, record: UsageRecord) -> None:
        call, version = self._call, self._call.target.version
        labels = record.model, call.service.service_class.value
        latencies = list(_latencies(record))
        call.trace.when_kept(partial(_exemplify, latencies, labels))
        for each in Status:
            telemetry.requests.add(each is record.status, *labels, each.value)
        telemetry.tokens.add(record.prompt_tokens, *labels, "prompt")
        telemetry.tokens.add(record.cached_tokens, *labels, "cached")
        telemetry.tokens.add(record.completion_tokens, *labels, "completion")
        # Value of the label `error.type` of the GenAI conventions. Empty if there was no error.
        error = "_OTHER" if record.status is Status.FAILED else ""
        about = operation(call), telemetry.PROVIDER, record.model, error
        for seconds, histogram, of_genai in latencies:
            histogram.record(seconds, *labels)
            if not error or of_genai is telemetry.server_duration:
                of_genai.record(seconds, *about)
        num_tokens = record.prompt_tokens + record.completion_tokens
        telemetry.tenant_use.add((record.tenant_id,), num_tokens, 1, record.cost * PICO, 0)
        if version is not None:
            place = record.tenant_id, version.name, str(version.version)
            telemetry.adapter_use.add(place, num_tokens, 1)

    def _made(self, generation: Generation, status: Status) -> UsageRecord:
        call, usage, first_at = self._call, generation.usage, generation.first_output_at
        reservation = self._reservation
        version = call.target.version
        cost = reservation.cost(usage)
        return UsageRecord(
            request_id=call.request_id,
            admitted_at=reservation.admitted_at,
            tenant_id=call.caller.tenant.id,
            key_id=call.caller.key.id,
            model=call.target.base.name,
            adapter=version.name if version else None,
            adapter_version=version.version if version else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_ms=None if first_at is None else round((first_at - self._started_at) * 1e3, 3),
            duration_ms=round((time.perf_counter() - self._started_at) * 1e3, 3),
            finish_reasons=generation.finish_reasons,
            worker=generation.worker_id,
            trace_id=call.trace.trace_id,
            status=status,
            gateway=reservation.holder,
            metered_tokens=reservation.metered(usage),
            cost=sum(cost),
            leased=reservation.leased,
            input_cost=cost.input,
            cached_input_cost=cost.cached_input,
            output_cost=cost.output,
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
