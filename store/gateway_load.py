"""Load of a gateway in the last minute, as stored in the database. Does not import torch."""

from __future__ import annotations

import msgspec

Latencies = list[tuple[float, int]]
"""Histogram: number of values up to each bound in seconds and above the previous one, ascending."""


class ModelLoad(msgspec.Struct, frozen=True):
    """Requests of a base model and its adapters that began on a worker and have ended."""

    model: str
    """Served name of the base model."""
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache."""
    completion_tokens: int = 0
    ttft: Latencies = []
    """Time from the first byte of a request to its first token."""


class TenantLoad(msgspec.Struct, frozen=True):
    tenant: str
    """Id of the tenant, or `other`."""
    tokens: int
    """Tokens of prompts and completions."""
    requests: int


class LastError(msgspec.Struct, frozen=True):
    """Last failure with a code since the gateway started."""

    code: str
    at: float
    """Seconds since 1970."""
    request_id: str
    number: int
    """Number of failures with this code."""


class GatewayLoad(msgspec.Struct, frozen=True):
    seconds: float
    """Seconds covered by the counts. Less than a minute after a start."""
    requests_in_flight: int = 0
    models: list[ModelLoad] = []
    refusals: dict[str, int] = {}
    """Answers with a status of 400 or more, by code."""
    tenants: list[TenantLoad] = []
    """Tenants with the most tokens, the most first."""
    errors: list[LastError] = []
    """Newest first."""
