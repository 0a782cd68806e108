"""Response body of the overview."""

from __future__ import annotations

from datetime import datetime

import msgspec

from admin.overview.latencies import Percentiles
from admin.workers.workers import State


class Held(msgspec.Struct, frozen=True):
    """Adapters in one tier."""

    number: int
    bytes: int


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: State
    reason: str
    """Why gateways cannot reach the worker, or the problem of its base models. Empty if none."""
    num_running: int
    num_waiting: int
    tokens_per_s: float
    """Generated tokens per second."""
    itl: Percentiles | None
    """Times between two tokens of a sequence in the last minute."""
    resident: list[str]
    """Names of the base models on the worker's device."""
    memory: dict[str, int]
    """Bytes of the worker's device by use: free, kv, adapters, weights."""
    adapters: dict[str, Held]
    """Adapters by the nearest tier that has them: device, host, loading."""


class ModelOverview(msgspec.Struct, frozen=True, kw_only=True):
    """Base model with and without adapters. Rates and times are of the last minute."""

    name: str
    num_on_device: int
    """Number of workers that have the model on the device."""
    num_running: int
    num_waiting: int
    requests_per_s: float
    failed: int
    """Failed requests."""
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    """Prompt tokens per second found in a prefix cache."""
    completion_tokens_per_s: float
    ttft: Percentiles | None
    """Time from the first byte of a request to its first token, at the gateways."""
    itl: Percentiles | None


class TenantOverview(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Id of the tenant. `other` stands for all tenants that gateways do not count separately."""
    name: str
    """Name of the tenant. Empty if the tenant does not exist."""
    requests_per_s: float
    tokens_per_s: float
    """Tokens of prompts and completions."""
    kv_bytes: int
    adapter_bytes: int


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Problem of a worker, an adapter or a gateway."""

    place: str
    """A worker, an adapter by its digest, or a gateway."""
    code: str
    message: str = ""
    at: datetime | None = None
    """Time of the last failure. null for a present problem."""
    number: int = 1
    """Number of failures since the gateway started."""
    request_id: str = ""
    """Id of the last failed request, as in the log."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    num_tenants: int
    num_adapters: int
    num_workers: int
    num_gateways: int
    requests_in_flight: int
    requests_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    ttft: Percentiles | None
    itl: Percentiles | None
    refusals: dict[str, int]
    """Answers with status 400 or more in the last minute, by code, most frequent first."""
    workers: list[WorkerOverview]
    models: list[ModelOverview]
    tenants: list[TenantOverview]
    """Tenants with the most use: most tokens first, then most memory."""
    troubles: list[Trouble]
    """Present problems, then the last failures of gateways, newest first."""
    object: str = "overview"
