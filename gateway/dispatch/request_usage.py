"""What one request used, recorded once however it ends."""

from __future__ import annotations

import time
from functools import partial

from gateway import telemetry
from gateway.dispatch.generation import Generation
from gateway.dispatch.sequences import Call, operation
from gateway.exceptions import UsageUnavailable
from gateway.limits.admission import Reservation
from gateway.metering.usage import Status, UsageRecord, UsageRecorder
from gateway.metering.wal import Batch


class RequestUsage:
    """The usage record of one admitted request: the first way in which it ends counts."""

    def __init__(
        self, recorder: UsageRecorder, call: Call, reservation: Reservation, started_at: float
    ) -> None:
        """`started_at` is of time.perf_counter()."""
        self._recorder = recorder
        self._call = call
        self._reservation = reservation
        self._started_at = started_at
        self._batch: Batch | None = None

    @property
    def request_id(self) -> str:
        return self._call.request_id

    def record(self, generation: Generation, status: Status) -> Batch:
        """The batch of the record, which will be written whether it is awaited or not."""
        if self._batch is None:
            record = self._made(generation, status)
            self._batch = self._recorder.append(record)
            self._count(record)
        return self._batch

    async def keep(self, generation: Generation, status: Status) -> None:
        """Records, and returns when the record is on the disk. Raises UsageUnavailable."""
        trace = self._call.trace
        trace.enter("usage")
        try:
            await self.record(generation, status).synced()
            trace.leave()
        except OSError as error:
            raise UsageUnavailable("What this request used could not be recorded.") from error

    def _count(self, record: UsageRecord) -> None:
        version = self._call.target.version
        model, service_class = record.model, self._call.service.service_class.value
        self._call.trace.when_kept(
            partial(
                telemetry.note_trace,
                model=model,
                service_class=service_class,
                completion_tokens=record.completion_tokens,
                ttft_ms=record.ttft_ms,
                duration_ms=record.duration_ms,
            )
        )
        telemetry.note_request(
            operation=operation(self._call),
            error="_OTHER" if record.status is Status.FAILED else "",
            model=model,
            service_class=service_class,
            status=record.status.value,
            tenant=record.tenant_id,
            adapter=version and (version.name, version.version),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            pico_dollars=record.cost,
            ttft_ms=record.ttft_ms,
            duration_ms=record.duration_ms,
        )

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
