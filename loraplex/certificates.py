"""Reads the expiry of a certificate from its file."""

from __future__ import annotations

from pathlib import Path


def expiry_of(path: Path) -> float:
    """Returns the time at which the first certificate of a PEM file expires, in seconds since 1970.
    Raises OSError, or ValueError if the file has no certificate."""
    # Imported here, because this import is slow and most processes have no certificate.
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except ValueError as error:
        raise ValueError(f"{path} has no certificate that can be read") from error
