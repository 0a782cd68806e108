"""TLS of the public port, with a certificate that is reloaded when its file changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from loraplex.errors import BadSettings, reason_of
from loraplex.settings import Settings

RELOAD_S = 10.0
"""Seconds between checks of the certificate's files, which are renewed days before they expire."""

log = logging.getLogger(__name__)


def load_tls(settings: Settings) -> ssl.SSLContext | None:
    """Returns the TLS context, or None if the settings have none. Raises BadSettings."""
    files = _files(settings)
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        _load(context, *files)
    except OSError as error:
        names = " and ".join(map(str, files))
        raise BadSettings(f"tls_certificate, tls_key: {names}: {reason_of(error)}") from None
    return context


async def follow_files(
    context: ssl.SSLContext, settings: Settings, interval_s: float = RELOAD_S
) -> None:
    """Reloads the certificate for new connections whenever its files change, until cancelled. Files
    that cannot be used are logged once, and the old certificate is kept."""
    files = _files(settings)
    assert files is not None
    seen = _times(files)
    while True:
        await asyncio.sleep(interval_s)
        if (now := _times(files)) == seen:
            continue
        seen = now
        try:
            # The files are loaded into another context first, because a key that does not match
            # would leave the context in use inconsistent.
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *files)
            _load(context, *files)
            log.info("%s was read again", files[0])
        except OSError as error:
            log.error(
                "reading the TLS certificate again failed, using the last one: %s: %s",
                files[0],
                reason_of(error),
            )


def _files(settings: Settings) -> tuple[Path, Path] | None:
    given = (settings.tls_certificate, settings.tls_key)
    match given:
        case (None, None):
            return None
        case (Path() as certificate, Path() as key):
            return certificate.expanduser().absolute(), key.expanduser().absolute()
        case _:
            raise BadSettings("give tls_certificate and tls_key, or neither")


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    # Without the argument `password`, an encrypted key would prompt on the terminal.
    context.load_cert_chain(certificate, key, password=lambda: "")


def _times(files: tuple[Path, Path]) -> list[int]:
    """Returns the modification times of the files. The time of a missing file is 0."""
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
