"""References to adapter versions, in frames between gateways and workers. Torch-free."""

from __future__ import annotations

import msgspec


class AdapterSignature(msgspec.Struct, frozen=True):
    """Ed25519 signature of an adapter's content, and the raw public key that verifies it."""

    public_key: bytes
    signature: bytes


class AdapterRef(msgspec.Struct, frozen=True):
    """Reference to an immutable adapter version. `digest` alone identifies the version, and `name`
    is for logs and messages."""

    digest: str
    name: str = ""
    checksum: str = ""
    """SHA-256 (hex) of the packed image in the receiving worker's layout, as an earlier probe of
    the adapter reported it. Empty if no probe for this layout has succeeded."""
    is_ephemeral: bool = False
    """Whether the version is temporary. The packed image of a temporary version is not kept in the
    disk cache."""
    signed: AdapterSignature | None = None
    """Signature that the worker checks when it loads the image. None for an unsigned version."""
