"""State of a worker, as it reports it to gateways. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

UNSATISFIABLE = "unsatisfiable"
"""Value of `ModelStatus.tier` for a model that the worker cannot serve with its configuration.
`ModelStatus.error` says why."""


class AdapterStatus(msgspec.Struct, frozen=True):
    digest: str
    tier: str
    """Place of the adapter: "host", "device" or "loading". With "disk" or "store", the adapter is
    not loaded, and is listed only to report the `error` of its last load."""
    num_bytes: int
    leases: int
    pinned: bool
    error: str = ""
    """Error code if the adapter's last load failed, else empty."""
    message: str = ""
    name: str = ""
    """`name@version` under which the adapter was last requested; empty if it never was."""


class ModelStatus(msgspec.Struct, frozen=True):
    digest: str
    name: str
    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Number of cached pages that no sequence uses. They count neither as free nor as used."""
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_adapter_evictions: int = 0
    num_integrity_failures: int = 0
    """Number of failed integrity checks, which run while the worker is idle. A failure means that
    the worker has a bug."""
    tier: str = "device"
    """Place of the weights: "device", "loading" (to the device), "draining" (on the device, and
    unloaded once the model is idle), "host", "cold" (not fetched yet) or "unsatisfiable"."""
    num_bytes: int = 0
    """Bytes that the weights occupy on the device, or occupied when they were last loaded. If they
    were never loaded, this is the planned number of bytes."""
    num_swaps: int = 0
    """Number of times that the model was loaded to the device."""
    idle_s: float = 0.0
    """Seconds since the model's last request ended; 0 while it has requests."""
    load_s: float = 0.0
    """Seconds that the last load to the device took, or an estimate if the model was never
    loaded."""
    error: str = ""
    """Error message if the model's last load failed, else empty."""
    max_num_seqs: int = 0
    num_waiting_tokens: int = 0
    """Number of prompt tokens of running and waiting sequences that are neither computed nor
    cached."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens computed per second in recent steps, or in the warm-up before the first
    request; 0 if unknown."""
    decode_step_s: float = 0.0
    """Mean seconds of recent steps that computed no prompt; 0 if unknown."""
    answer_tokens: float = 0.0
    """Mean number of tokens of recent answers; 0 if unknown."""
    adapter_loads: dict[str, int] = {}
    """Number of adapter loads to each tier, "host" or "device"."""
    adapter_load_s: dict[str, float] = {}
    """Total seconds of adapter loads to each tier, "host" or "device"."""
    num_failed_adapter_loads: int = 0
    num_proof_steps: int = 0
    """Number of finished steps of adapter verifications. While it grows, queued probes make
    progress."""
    itl: list[tuple[float, int]] = []
    """Histogram of the inter-token latencies of the last minute. Each entry is a pair: the upper
    bound of a bucket in seconds, and the number of latencies in this bucket. The lower bound is the
    previous entry's bound."""


class TenantStatus(msgspec.Struct, frozen=True):
    """Device memory that is charged to a tenant."""

    tenant: str
    """Tenant id; empty for memory that no tenant requested."""
    kv_bytes: int
    """Bytes of the KV pages that the tenant's sequences computed, whether in use or only cached."""
    adapter_bytes: int
    """Bytes of the adapters whose most recent request came from this tenant."""


def why_unsatisfiable(models: Sequence[ModelStatus]) -> str | None:
    """Returns the reason why the worker can serve none of its models. Returns None if the worker
    can serve at least one model, possibly later, or has no models."""
    if not models or any(model.tier != UNSATISFIABLE for model in models):
        return None
    return f"{models[0].name}: {UNSATISFIABLE}: {models[0].error}"


class WorkerStatus(msgspec.Struct, frozen=True, tag="status"):
    """State of a worker, sent every second and after a `Drain`."""

    instance_id: str
    draining: bool
    models: list[ModelStatus]
    adapters: list[AdapterStatus]
    arena_bytes: int
    extents: str
    """One character for each extent of the arena: '.' free, 'k' KV, 'a' adapters, 'w' weights."""
    settings: dict[str, str]
    step: int
    tokens_per_s: float
    generation: int = 0
    """Generation of the last `Desired` that the worker applied."""
    tenants: list[TenantStatus] = []
    """Tenants that use the most device memory."""
    num_late_kernels: int = 0
    """Number of kernels that were compiled, or read from the kernel cache, after the worker had
    become ready."""
    num_cached_adapters: int = 0
    """Number of adapter images in the disk cache, including images of adapters that are also on the
    host or the device."""
    cached_adapter_bytes: int = 0
    num_unlisted_adapters: int = 0
    """Number of adapters that `adapters` leaves out, because the list has a maximum length."""
    adapter_counts: dict[str, int] = {}
    """Number of adapters by their nearest tier, "host", "device" or "loading", including those that
    are not listed. Empty from a worker of an older version, which lists all adapters."""
    adapter_bytes: dict[str, int] = {}
    """Bytes of adapters by their nearest tier, as in `adapter_counts`."""
