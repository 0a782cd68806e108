"""Usage records: one a request, on the disk before its answer ends."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gateway.exceptions import UsageUnavailable
from gateway.metering.wal import Batch, WriteAheadLog


class Status(StrEnum):
    """How a request that was admitted ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client left, or was cut because it did not read."""


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a request used, known when it has ended. Holds no prompt and no answer.

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
    """The holder of the leases that it was reserved from."""
    metered_tokens: int = 0
    """As quotas count them."""
    cost: int = 0
    """Pico-dollars."""
    leased: int = 0
    """The budgets that it was reserved from, as bits: quota.leased_bits."""
    input_cost: int = 0
    """Cost of computed prompt tokens. The three are `cost`, or 0 where it was not split."""
    cached_input_cost: int = 0
    output_cost: int = 0


class UsageRecorder:
    """Writes usage records to the write-ahead log."""

    def __init__(self, wal: WriteAheadLog, max_bytes: int) -> None:
        self._wal = wal
        self._max_bytes = max_bytes

    def why_unavailable(self) -> str | None:
        """Returns why every request is refused, for operators, or None if none is."""
        if self._wal.failure is not None:
            reason = self._wal.failure.strerror or self._wal.failure
            return f"the usage log cannot be written: {reason}"
        if self._is_full:
            return "the usage log is full: the database does not take what it holds"
        return None

    @property
    def _is_full(self) -> bool:
        return self._wal.num_bytes >= self._max_bytes

    def check(self) -> None:
        """Raises UsageUnavailable if what a new request used could not be recorded."""
        if self._wal.failure is not None:
            raise UsageUnavailable("Usage cannot be recorded at the moment.")
        if self._is_full:
            raise UsageUnavailable("Too much usage waits to be stored.", code="usage_spool_full")

    def append(self, record: UsageRecord) -> Batch:
        """The batch of the record, which will be written whether it is awaited or not."""
        return self._wal.append(msgspec.msgpack.encode(record))
