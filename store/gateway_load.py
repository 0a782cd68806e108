"""Load of a gateway in the last minute, as stored in the database. Does not import torch."""

from __future__ import annotations

import msgspec

Latencies = list[tuple[float, int]]
"""Histogram as pairs of an upper bound in seconds and a count, ascending. Each count covers the
values between the previous bound and this one."""


class ModelLoad(msgspec.Struct, frozen=True):
    """Requests of a base model and its adapters that were started on a worker and have ended."""

    model: str
    """Served name of the base model."""
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache."""
    completion_tokens: int = 0
    ttft: Latencies = []
    """Histogram of seconds from the first byte of a request to its first token."""


class TenantLoad(msgspec.Struct, frozen=True):
    tenant: str
    """Id of the tenant, or `other`."""
    tokens: int
    """Tokens of prompts and completions."""
    requests: int


class LastError(msgspec.Struct, frozen=True):
    """Last failure with a given error code since the gateway started."""

    code: str
    at: float
    """Seconds since 1970."""
    request_id: str
    number: int
    """Number of failures with this code since the gateway started."""


class GatewayLoad(msgspec.Struct, frozen=True):
    seconds: float
    """Seconds covered by the counts. Less than a minute after a start."""
    requests_in_flight: int = 0
    models: list[ModelLoad] = []
    refusals: dict[str, int] = {}
    """Number of answers with a status of 400 or more, by error code."""
    tenants: list[TenantLoad] = []
    """Tenants that used the most tokens, in descending order."""
    errors: list[LastError] = []
    """Last errors, the newest first."""
