"""What a gateway tells of its last minute, as the database holds it. Torch-free."""

from __future__ import annotations

import msgspec

Latencies = list[tuple[float, int]]
"""How many values were at most so many seconds, and more than the bound before; ascending."""


class ModelLoad(msgspec.Struct, frozen=True):
    """Requests of a base model, with and without adapter, that had begun on a worker and ended."""

    model: str
    """Its served name."""
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in a prefix cache."""
    completion_tokens: int = 0
    ttft: Latencies = []
    """From the first byte of a request to its first token."""


class TenantLoad(msgspec.Struct, frozen=True):
    tenant: str
    """Its id, or `other`."""
    tokens: int
    """Tokens of prompts and completions."""
    requests: int


class LastError(msgspec.Struct, frozen=True):
    """The last failure with a code, since the gateway started."""

    code: str
    at: float
    """Seconds since 1970."""
    request_id: str
    number: int
    """Number of failures with this code."""


class GatewayLoad(msgspec.Struct, frozen=True):
    seconds: float
    """That the counts are of; less than a minute after a start."""
    requests_in_flight: int = 0
    models: list[ModelLoad] = []
    refusals: dict[str, int] = {}
    """Answers with a status of 400 or more by code."""
    tenants: list[TenantLoad] = []
    """Those that used most tokens, the most first."""
    errors: list[LastError] = []
    """The newest first."""
