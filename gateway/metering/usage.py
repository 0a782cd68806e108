"""Usage records: one for each request, written to disk before its answer ends."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gateway.exceptions import UsageUnavailable
from gateway.metering.wal import Batch, WriteAheadLog


class Status(StrEnum):
    """Outcome of an admitted request."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client left, or was disconnected because it did not read."""


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """Usage of a request that has ended. Contains no prompt and no answer.

    Encoded by position, so that new fields must be at the end and have a default.
    """

    request_id: str
    """Value of the answer's header `x-request-id`. Older rows lack its prefix `req_`."""
    admitted_at: float
    """Seconds since 1970."""
    tenant_id: str
    key_id: str
    model: str
    """Served name of the base model."""
    adapter: str | None
    adapter_version: int | None
    prompt_tokens: int
    """Tokens of each prompt, once however many choices it has, including those found in a cache."""
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    """From the request's arrival to the worker's first output. None if there was no output."""
    duration_ms: float
    finish_reasons: list[str | None]
    """One for each choice. None if the choice did not finish."""
    worker: str
    trace_id: str | None
    status: Status
    gateway: str = ""
    """Holder of the leases from which the request was reserved."""
    metered_tokens: int = 0
    """Tokens that count against quotas."""
    cost: int = 0
    """Pico-dollars."""
    leased: int = 0
    """Budgets from which the request was reserved, as bits of `quota.leased_bits`."""
    input_cost: int = 0
    """Cost of computed prompt tokens. The three parts sum to `cost`, or are 0 in older records."""
    cached_input_cost: int = 0
    output_cost: int = 0


class UsageRecorder:
    """Writer of usage records to the write-ahead log."""

    def __init__(self, wal: WriteAheadLog, max_bytes: int) -> None:
        self._wal = wal
        self._max_bytes = max_bytes

    def why_unavailable(self) -> str | None:
        """Returns why every request is refused, for operators. Returns None if none is."""
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
        """Raises UsageUnavailable if the usage of a new request could not be recorded."""
        if self._wal.failure is not None:
            raise UsageUnavailable("Usage cannot be recorded at the moment.")
        if self._is_full:
            raise UsageUnavailable("Too much usage waits to be stored.", code="usage_spool_full")

    def append(self, record: UsageRecord) -> Batch:
        """Adds the record and returns its batch, which is written whether or not it is awaited."""
        return self._wal.append(msgspec.msgpack.encode(record))
