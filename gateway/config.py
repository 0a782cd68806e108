"""The gateway's settings, as its composition root hands them over."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.tracing import Tracing
from workers.wire.transport.base import Security


def new_instance_id() -> str:
    return f"gateway-{socket.gethostname()}-{secrets.token_hex(6)}"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    model_folder: Callable[[str], Path]
    """Where the tokenizer and configs of a model's digest lie; may have to fetch them."""
    instance_id: str = msgspec.field(default_factory=new_instance_id)
    """Names this gateway among all that ever were."""
    security: Security = Security()
    """How connections to workers over TCP are secured."""
    pepper: bytes
    """The secret of the keyed hash of API keys."""
    clock: Callable[[], float] = time.time
    """This machine's clock, in seconds since 1970."""
    wal: Path
    """Folder of the write-ahead log of usage; gateways may share it."""
    max_wal_bytes: int = 256 << 20
    """Bytes of usage not loaded yet, above which new requests are refused."""
    catalog_stale_s: float = 300.0
    """How long known keys and models are served while the database is away, in seconds."""
    default_chat_tokens: int = 4096
    """`max_tokens` of a chat that gives none, if the context has room."""
    default_completion_tokens: int = 16
    request_timeout_s: float = 600.0
    """How long a request that says nothing else has until its first token."""
    limits_wait_s: float = 1.0
    """How long a request waits for the database, or other gateways, to know of its limits."""
    tenant_refusals_per_minute: int = 1200
    """Requests of a tenant that may be refused after their bodies were read. One counts as one more
    for each 16 KiB."""
    failover_wait_s: float = 30.0
    """How long a request whose worker was lost waits for one when there is no other."""
    tracing: Tracing = Tracing()
    """Off by default."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser; `*`: all."""
    ping_interval_s: float = 15.0
    """A silent stream says `: ping` this often."""
    slow_client_s: float = 30.0
    """A client that reads nothing for this long is cut."""

    def default_tokens(self, *, is_chat: bool) -> int:
        """`max_tokens` of a request that gives none."""
        return self.default_chat_tokens if is_chat else self.default_completion_tokens
