"""Request body of signing keys."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from admin.schemas import EntityName


class SigningKeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {
        "name": "ci",
        "public_key": "ssh-ed25519 "
        "AAAAC3NzaC1lZDI1NTE5AAAAIDVnJTvNA4nBN9QkhXyTEJm8n/ZPXkcpECxk/G8sjLv7",
    }
    name: EntityName
    public_key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    """Ed25519 public key in PEM, or in OpenSSH's format (`ssh-ed25519 ...`)."""
