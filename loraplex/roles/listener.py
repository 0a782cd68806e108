"""Opens the ports of a role, before the role does anything else."""

from __future__ import annotations

import errno
import socket
import ssl
from ipaddress import ip_address

from loraplex.errors import BadSettings
from loraplex.port_holder import find_holder
from loraplex.settings import Settings
from web.server import bind

MANAGEMENT_PORT = 8002
"""Default management port. The gateway has 8000, and the health port of a worker is 8001."""


def listen(settings: Settings) -> socket.socket:
    """Returns the public listening socket. Raises BadSettings."""
    return _bind(settings.host, settings.port, "port")


def listen_for_management(settings: Settings) -> socket.socket:
    """Returns the management socket. It listens on the port of the settings, by default on
    MANAGEMENT_PORT, or on a free port if another process uses that. Raises BadSettings."""
    host, port = settings.management_host, settings.management_port
    if port is not None:
        return _bind(host, port, "management_port")
    try:
        return bind(host, MANAGEMENT_PORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise BadSettings(f"management_host: {host}: {error.strerror}") from error
        return _bind(host, 0, "management_port")


def inherited(descriptor: int) -> socket.socket:
    """Returns the listening socket that a supervisor passed to this process. Children of this
    process do not inherit it."""
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Returns whether the socket can be reached only from this machine."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def serves_apart(listener: socket.socket, tls: ssl.SSLContext | None) -> bool:
    """Returns whether only the management listener serves the admin plane: if other hosts can reach
    the public listener, or if it has TLS, because certificates name no loopback addresses."""
    return tls is not None or not is_loopback(listener)


def address_of(listener: socket.socket) -> str:
    """Returns an address HOST:PORT at which this machine itself can reach the socket, even if the
    socket listens on every address."""
    host, port = listener.getsockname()[:2]
    match host:
        case "0.0.0.0":
            host = "127.0.0.1"
        case "::":
            host = "[::1]"
        case _ if ":" in host:
            host = f"[{host}]"
        case _:
            pass
    return f"{host}:{port}"


def _bind(host: str, port: int, setting: str) -> socket.socket:
    try:
        return bind(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise BadSettings(f"{setting}: {host}:{port}: {error.strerror}") from error
        holder = find_holder(port) or "another process"
        flag, variable = setting.replace("_", "-"), f"LORAPLEX_{setting.upper()}"
        raise BadSettings(
            f"port {port} of {host} is taken by {holder}; "
            f"choose another with --{flag} or {variable}"
        ) from error
