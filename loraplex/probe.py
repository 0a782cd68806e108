"""Is somebody there, and ready? One GET on a socket, without a client library."""

from __future__ import annotations

import socket

TIMEOUT_S = 2.0


def answers_ok(address: str, path: str) -> bool:
    """Whether `GET path` answers 200 at HOST:PORT or `unix:PATH`; False for any failure."""
    try:
        with _open(address) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: probe\r\n\r\n".encode())
            return connection.recv(64).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


def _open(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(TIMEOUT_S)
            connection.connect(address.removeprefix("unix:"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
