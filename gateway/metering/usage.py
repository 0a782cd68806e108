"""Defines usage records. Each request has one, which is written to disk before the request's answer
ends."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Status(StrEnum):
    """Outcome of an admitted request."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The client disconnected, or was disconnected because it did not read the answer."""


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """Usage of a request that has ended. Contains no prompt and no answer.

    Records are encoded by position, so new fields must be added at the end and have a default.
    """

    request_id: str
    """Value of the answer's header `x-request-id`. Older rows lack the prefix `req_`."""
    admitted_at: float
    """Seconds since 1970."""
    tenant_id: str
    key_id: str
    model: str
    """Served name of the base model."""
    adapter: str | None
    adapter_version: int | None
    prompt_tokens: int
    """Number of prompt tokens, including cached ones. Each prompt counts once, even if it has
    several choices."""
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    """Milliseconds from the request's arrival to the worker's first output. None if there was no
    output."""
    duration_ms: float
    finish_reasons: list[str | None]
    """Finish reason of each choice. None for a choice that did not finish."""
    worker: str
    trace_id: str | None
    status: Status
    gateway: str = ""
    """Holder id of the leases from which the request's tokens and money were reserved."""
    metered_tokens: int = 0
    """Tokens that count against quotas."""
    cost: int = 0
    """Cost of the request in pico-dollars."""
    leased: int = 0
    """Daily and monthly budgets from which the request has reserved amounts, as bits of
    `quota_types.leased_bits`."""
    input_cost: int = 0
    """Cost of the prompt tokens that were not cached. `input_cost`, `cached_input_cost` and
    `output_cost` sum to `cost`, or are 0 in older records."""
    cached_input_cost: int = 0
    output_cost: int = 0
