"""The port of a role, taken before it does anything else."""

from __future__ import annotations

import socket

from gateway.server import bind
from loraplex.errors import BadSettings
from loraplex.settings import Settings


def listen(settings: Settings) -> socket.socket:
    """Raises BadSettings."""
    try:
        return bind(settings.host, settings.port)
    except OSError as error:
        raise BadSettings(f"{settings.host}:{settings.port}: {error.strerror}") from error
