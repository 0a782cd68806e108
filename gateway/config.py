"""Settings of the gateway."""

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
    """Returns the folder with the tokenizer and configs of the model with the given digest. May
    have to fetch the files."""
    instance_id: str = msgspec.field(default_factory=new_instance_id)
    """Unique id of this gateway process."""
    security: Security = Security()
    """Security of TCP connections to workers."""
    pepper: bytes
    """Secret key of the HMAC of API keys. The database stores only the HMACs."""
    clock: Callable[[], float] = time.time
    """Returns this machine's time in seconds since 1970."""
    wal: Path
    """Folder of the write-ahead log of usage. Several gateways may share it."""
    max_wal_bytes: int = 256 << 20
    """Maximum bytes of usage that is not loaded into the database yet. If there is more, new
    requests are refused."""
    catalog_stale_s: float = 300.0
    """Seconds for which known keys and models are served while the database is unavailable."""
    default_chat_tokens: int = 4096
    """Default `max_tokens` of chats. It is reduced to the room that the prompt leaves."""
    default_completion_tokens: int = 16
    request_timeout_s: float = 600.0
    """Default seconds that a request may take until its first token."""
    limits_wait_s: float = 1.0
    """Maximum seconds that a request waits for the database or other gateways to grant it a lease
    of limits."""
    tenant_refusals_per_minute: int = 1200
    """Maximum refusals per minute of a tenant's requests whose bodies were read. After that, its
    requests are refused unread. A refusal counts as one, plus one for each 16 KiB of the body."""
    failover_wait_s: float = 30.0
    """Maximum seconds that a request waits for a worker after its worker refused it or was lost."""
    tracing: Tracing = Tracing()
    """Tracing of requests, off by default."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests from a browser, or `*` for all."""
    ping_interval_s: float = 15.0
    """Seconds without an event after which a stream sends a ping."""
