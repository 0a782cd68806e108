"""When certificates end is read as the library that made them says, and shown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from loraplex.certificates import expiry_of

PEM = "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----"


def write(path: Path, end: datetime, common_name: str = "gateway.example") -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(end)
        .sign(key, SHA256())
    )
    path.write_bytes(b"leaf\n" + made.public_bytes(Encoding.PEM))
    return path


@pytest.mark.parametrize("days", [30, 40 * 365])
def test_the_end_is_that_of_the_certificate(tmp_path: Path, days: int) -> None:
    """After 2049 it is written in another form; a long name has a long length."""
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(days)
    path = write(tmp_path / "chain.pem", end, common_name="x" * 60)
    assert expiry_of(path) == end.timestamp()
    write(tmp_path / "other.pem", datetime(2030, 1, 1, tzinfo=UTC))
    with (tmp_path / "other.pem").open("ab") as file:
        file.write(path.read_bytes())
    assert expiry_of(tmp_path / "other.pem") == datetime(2030, 1, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("text", ["", "no certificate", PEM])
def test_what_is_no_certificate_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chain.pem"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"chain\.pem"):
        expiry_of(path)
