"""Opens the ports of a role, before it does anything else."""

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
"""Default port, next to 8000 of the gateway and 8001 of a worker's health."""


def listen(settings: Settings) -> socket.socket:
    """Returns the public listening socket. Raises BadSettings."""
    return _bind(settings.host, settings.port, "port")


def listen_for_management(settings: Settings) -> socket.socket:
    """Returns the management socket, on the port of the settings. Default: MANAGEMENT_PORT, or a
    free port if another process uses that. Raises BadSettings."""
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
    """Returns the listening socket inherited from a supervisor. Children of this process do not
    inherit it."""
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Returns whether only this machine can reach the socket."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def serves_apart(listener: socket.socket, tls: ssl.SSLContext | None) -> bool:
    """Returns whether the admin plane is only on the management listener, because other hosts can
    reach the public one, or TLS requires a name that this machine does not use."""
    return tls is not None or not is_loopback(listener)


def address_of(listener: socket.socket) -> str:
    """Returns HOST:PORT for this machine's own use, even if the socket listens on every address."""
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
