"""The usage ledger: one record a request, on the disk before its answer ends."""

from __future__ import annotations

import re
import time
from enum import StrEnum

import msgspec

from gateway.dispatch.generation import Generation
from gateway.dispatch.sequences import Call
from gateway.exceptions import UsageUnavailable
from gateway.limits.admission import Reservation
from gateway.metering.wal import Batch, Spool

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Status(StrEnum):
    """How a request that was admitted ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client left, or was cut because it did not read."""


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a request when it has ended; nothing of what was said.

    Written by position: fields may only be added, at the end and with a default.
    """

    request_id: str
    """The answer's header `x-request-id`. Older rows lack its `req_`."""
    admitted_at: float
    """Seconds since 1970."""
    tenant_id: str
    key_id: str
    model: str
    """Served name of the base model."""
    adapter: str | None
    adapter_version: int | None
    prompt_tokens: int
    """Each prompt once, however many choices it has; those found in a cache too."""
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    """From the request's arrival to the first output of the worker; None: there was none."""
    duration_ms: float
    finish_reasons: list[str | None]
    """One a choice; None: it was not finished."""
    worker: str
    trace_id: str | None
    status: Status
    gateway: str = ""
    """Who reserved it, as the slices of limits have it."""
    metered_tokens: int = 0
    """As quotas count them."""
    cost: int = 0
    """Pico-dollars."""
    leased: int = 0
    """The budgets that it was reserved from, as bits: quota.leased_bits."""
    input_cost: int = 0
    """Of prompt tokens that were computed. The three are `cost`, or 0 where it was not split."""
    cached_input_cost: int = 0
    output_cost: int = 0


class Ledger:
    """Opens an entry for each request that is admitted."""

    def __init__(self, spool: Spool, max_bytes: int) -> None:
        self._spool = spool
        self._max_bytes = max_bytes

    def check(self) -> None:
        """Raises UsageUnavailable if what a new request used could not be recorded."""
        if self._spool.failure is not None:
            raise UsageUnavailable("Usage cannot be recorded at the moment.")
        if self._spool.num_bytes >= self._max_bytes:
            raise UsageUnavailable("Too much usage waits to be stored.", code="usage_spool_full")

    def begin(self, call: Call, reservation: Reservation, started_at: float) -> Entry:
        """`started_at` is of time.perf_counter()."""
        return Entry(self._spool, call, reservation, started_at)


class Entry:
    """Of one request. Recorded once, by whatever ends it first."""

    def __init__(
        self, spool: Spool, call: Call, reservation: Reservation, started_at: float
    ) -> None:
        self._spool = spool
        self._call = call
        self._reservation = reservation
        self._started_at = started_at
        self._batch: Batch | None = None

    def record(self, generation: Generation, status: Status) -> Batch:
        """The batch of the record, which will be written whether it is waited for or not."""
        if self._batch is None:
            made = self._made(generation, status)
            self._batch = self._spool.append(msgspec.msgpack.encode(made))
        return self._batch

    async def keep(self, generation: Generation, status: Status) -> None:
        """Records, and returns when it is on the disk. Raises UsageUnavailable."""
        try:
            await self.record(generation, status).synced()
        except OSError as error:
            raise UsageUnavailable("What this request used could not be recorded.") from error

    def _made(self, generation: Generation, status: Status) -> UsageRecord:
        call, usage, first_at = self._call, generation.usage, generation.first_output_at
        reservation = self._reservation
        version = call.target.version
        cost = reservation.cost(usage)
        trace = _TRACEPARENT.fullmatch(call.traceparent or "")
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
            trace_id=trace[1] if trace else None,
            status=status,
            gateway=reservation.holder,
            metered_tokens=reservation.metered(usage),
            cost=sum(cost),
            leased=reservation.leased,
            input_cost=cost.input,
            cached_input_cost=cost.cached_input,
            output_cost=cost.output,
        )
