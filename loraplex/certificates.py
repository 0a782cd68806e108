"""Reads the expiry of a certificate from its file."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_PEM = re.compile(f"{BEGIN}.+?{END}", re.DOTALL)
VERSION, UTC_TIME = 0xA0, 0x17


def expiry_of(path: Path) -> float:
    """Returns when the first certificate of a PEM file expires, in seconds since 1970. Raises
    OSError, or ValueError if the file has no certificate."""
    found = _PEM.search(path.read_text(errors="replace"))
    if found is None:
        raise ValueError(f"{path} holds no certificate")
    try:
        return _not_after(ssl.PEM_cert_to_DER_cert(found[0]))
    except (IndexError, ValueError) as error:
        raise ValueError(f"{path} holds no certificate that can be read") from error


def _not_after(der: bytes) -> float:
    """Returns the end of the certificate's validity, in seconds since 1970. RFC 5280 nests
    Certificate, TBSCertificate, then version, serial number, algorithm, issuer and validity."""
    signed = _children(_children(der)[0][1])
    fields = _children(signed[0][1])
    if fields[0][0] == VERSION:
        fields = fields[1:]
    kind, text = _children(fields[3][1])[1]
    form = "%y%m%d%H%M%SZ" if kind == UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _children(data: bytes) -> list[tuple[int, bytes]]:
    """Returns the tag and contents of each DER value in `data`."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length = int.from_bytes(data[at : at + num_bytes])
            at += num_bytes
        found.append((tag, data[at : at + length]))
        at += length
    return found
