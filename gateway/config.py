"""The gateway's settings, as its composition root hands them over."""

from __future__ import annotations

from pathlib import Path

import msgspec


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    store: Path
    """Holds `models/<digest>/`, of which the torch-free half is read."""
    pepper: bytes
    """The secret of the keyed hash of API keys."""
    default_chat_tokens: int = 4096
    """`max_tokens` of a chat that gives none, if the context has room."""
    default_completion_tokens: int = 16
    ping_interval_s: float = 15.0
    """A silent stream says `: ping` this often."""
    slow_client_s: float = 30.0
    """A client that reads nothing for this long is cut."""
