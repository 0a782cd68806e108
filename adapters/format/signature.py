"""Detached ed25519 signatures of an adapter's content, and of an upload. Torch-free.

The signature of the content covers the two files. Workers check it when they load the adapter. The
signature of an upload also covers the adapter's name, the base model that the upload names, and its
serving data. The admin plane checks it when it creates the version, so that nobody can reuse a
signature of the content to publish it under another name or with other serving data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

TAG = b"loraplex adapter signature 1\0"
"""Prefix of the signed bytes, so that no signature of another kind of message is valid for an
adapter."""
UPLOAD_TAG = b"loraplex adapter signature 2\0"
"""Prefix of the signed bytes of an upload."""
SIGNED_FIELDS = ("name", "model", "serving", "folder_serving", "folder_tokens")
"""Fields of an upload that its signature covers."""
SIGNATURE_BYTES = 64
MAX_KEY_BYTES = 16 << 10


class KeyRefused(ValueError):
    """Error for text that is not an ed25519 key of the required kind (private or public)."""


def sign(private: Ed25519PrivateKey, digest: str) -> bytes:
    """Returns the signature of the content with this digest (hex)."""
    return private.sign(TAG + bytes.fromhex(digest))


def sign_upload(private: Ed25519PrivateKey, digest: str, fields: Mapping[str, Any]) -> bytes:
    """Returns the signature of an upload of the content with this digest (hex). fields: fields of
    the upload, of which those in SIGNED_FIELDS are signed."""
    return private.sign(_upload_bytes(digest, fields))


def is_upload_signed(
    public: bytes, signature: bytes, digest: str, fields: Mapping[str, Any]
) -> bool:
    """Whether `signature` is a signature of an upload, made with the private key that belongs to
    `public`. The arguments are as in `is_signed` and `sign_upload`."""
    return _is_valid(public, signature, _upload_bytes(digest, fields))


def _upload_bytes(digest: str, fields: Mapping[str, Any]) -> bytes:
    """Returns the bytes that are signed: a tag, the digest, and the SHA-256 of the fields as JSON
    with sorted keys and without spaces. A missing field is signed as null, and so is an empty one.
    """
    values = {name: fields.get(name) or None for name in SIGNED_FIELDS}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return UPLOAD_TAG + bytes.fromhex(digest) + hashlib.sha256(text.encode()).digest()


def is_signed(public: bytes, signature: bytes, digest: str) -> bool:
    """Whether `signature` is a signature of the content with this digest (hex), made with the
    private key that belongs to `public`.

    public: 32 raw bytes of the public key.
    """
    return _is_valid(public, signature, TAG + bytes.fromhex(digest))


def _is_valid(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_private_key(text: bytes) -> Ed25519PrivateKey:
    """Reads an ed25519 private key in PEM (PKCS 8) or in OpenSSH's format. Raises KeyRefused for
    other text and for a key with a passphrase."""
    is_ssh = b"BEGIN OPENSSH PRIVATE KEY" in text
    load = load_ssh_private_key if is_ssh else load_pem_private_key
    try:
        key = load(text[:MAX_KEY_BYTES], password=None)
    except TypeError:
        raise KeyRefused("the key has a passphrase: give one without") from None
    except (ValueError, UnsupportedAlgorithm):
        raise KeyRefused("not a private key in PEM or in OpenSSH's form") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyRefused("not an ed25519 key")
    return key


def read_public_key(text: str) -> bytes:
    """Reads an ed25519 public key in PEM or in the form `ssh-ed25519 ...`, and returns its 32 raw
    bytes. Raises KeyRefused for other text."""
    raw = text.strip().encode("ascii", "replace")
    if b"PRIVATE KEY" in raw:
        raise KeyRefused("this is a private key: keep it, and register the public one")
    load = load_ssh_public_key if raw.startswith(b"ssh-") else load_pem_public_key
    try:
        key = load(raw[:MAX_KEY_BYTES])
    except (ValueError, UnsupportedAlgorithm):
        raise KeyRefused("not a public key in PEM or in OpenSSH's form") from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyRefused("not an ed25519 key")
    return key.public_bytes_raw()
