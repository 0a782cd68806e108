"""The admin plane's settings, as its composition root hands them over."""

from __future__ import annotations

import msgspec


class AdminConfig(msgspec.Struct, frozen=True, kw_only=True):
    pepper: bytes
    """The secret of the keyed hash of API keys."""
    max_upload_bytes: int = 1 << 30
    max_lora_rank: int = 256
    usage_days: int = 90
    """How long the rows of single requests are kept, today included."""
    upload_idle_s: float = 60.0
    """An upload of which nothing came for so long is given up, and nothing of it stays."""
