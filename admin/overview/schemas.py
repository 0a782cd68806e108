"""What runs and how busy it is, as the admin plane tells it."""

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
    """Why gateways do not reach it, or what is wrong with its base models; empty if nothing is."""
    num_running: int
    num_waiting: int
    tokens_per_s: float
    """Generated."""
    itl: Percentiles | None
    """Times between two tokens of a sequence, in the last minute."""
    resident: list[str]
    """Names of the base models that are on its device."""
    memory: dict[str, int]
    """Bytes of its device by what they are for: free, kv, adapters, weights."""
    adapters: dict[str, Held]
    """By the nearest tier that has them: device, host, loading."""


class ModelOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A base model, with and without adapter. Rates and times are of the last minute."""

    name: str
    num_on_device: int
    """Workers that have it there."""
    num_running: int
    num_waiting: int
    requests_per_s: float
    failed: int
    """Requests."""
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    """Prompt tokens that were found in a prefix cache."""
    completion_tokens_per_s: float
    ttft: Percentiles | None
    """From the first byte of a request to its first token, at the gateways."""
    itl: Percentiles | None


class TenantOverview(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Or `other`: all that no gateway counts by name."""
    name: str
    """Empty: it is no tenant any more, or never was one."""
    requests_per_s: float
    tokens_per_s: float
    """Tokens of prompts and completions."""
    kv_bytes: int
    adapter_bytes: int


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    place: str
    """A worker, an adapter by its digest, or a gateway."""
    code: str
    message: str = ""
    at: datetime | None = None
    """When it happened last; null: it is so now."""
    number: int = 1
    """How often, since its gateway started."""
    request_id: str = ""
    """Id of the last one, as in the log."""


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
    """Answers of the last minute with a status of 400 or more, by code; the most first."""
    workers: list[WorkerOverview]
    models: list[ModelOverview]
    tenants: list[TenantOverview]
    """Those that used or hold most; those that used most first."""
    troubles: list[Trouble]
    """What is wrong now, then the last failures of gateways, the newest first."""
    object: str = "overview"
