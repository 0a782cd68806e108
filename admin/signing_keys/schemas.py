"""Bodies of signing keys."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from admin.schemas import EntityName, shown
from admin.signing_keys.signing_keys import SigningKey


class SigningKeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {
        "name": "ci",
        "public_key": "ssh-ed25519 "
        "AAAAC3NzaC1lZDI1NTE5AAAAIDVnJTvNA4nBN9QkhXyTEJm8n/ZPXkcpECxk/G8sjLv7",
    }
    name: EntityName
    public_key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    """Ed25519 public key in PEM, or in OpenSSH's format (`ssh-ed25519 ...`)."""


class SigningKeyView(msgspec.Struct, frozen=True):
    id: str
    name: str
    public_key: str
    """Base64 of the public key's 32 bytes."""
    created_at: datetime
    revoked_at: datetime | None
    versions: int
    """Number of versions that the key has signed."""
    object: str = "signing_key"

    @classmethod
    def of(cls, key: SigningKey) -> SigningKeyView:
        return shown(cls, key, public_key=base64.b64encode(key.public_key).decode())
