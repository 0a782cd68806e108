"""The admin plane's settings, as its composition root hands them over."""

from __future__ import annotations

import msgspec

from admin.quotas.schemas import TenantLimits


class AdminConfig(msgspec.Struct, frozen=True, kw_only=True):
    pepper: bytes
    """The secret of the keyed hash of API keys."""
    max_upload_bytes: int = 1 << 30
    max_lora_rank: int = 256
    usage_days: int = 90
    """How long the rows of single requests are kept, today included."""
    audit_days: int = 400
    """How long rows of the audit log are kept."""
    tenant_writes_per_minute: int = 60
    """Changes that a tenant's keys may make; five minutes' worth of them at once."""
    default_quota: TenantLimits | None = None
    """Limits of a tenant that is created."""
    upload_idle_s: float = 60.0
    """Seconds of waiting for the client in which an upload must bring `min_upload_rate` on average;
    otherwise it is given up. One in pieces that is not continued for so long is removed."""
    min_upload_rate: int = 16 << 10
    """Bytes a second; slower, an upload would hold its place for days. A line of 1 Mbit/s brings 7
    times as many."""
