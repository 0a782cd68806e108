"""Sends one GET on a socket, without a client library, to see whether a server is ready."""

from __future__ import annotations

import socket

TIMEOUT_S = 2.0
MAX_BYTES = 4096


def answers_ok(address: str, path: str) -> bool:
    """Returns whether `GET path` answers 200 at HOST:PORT or `unix:PATH`. Returns False after a
    failure."""
    return answer_of(address, path).startswith(b"HTTP/1.1 200 ")


def answer_of(address: str, path: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the first bytes of the answer to `GET path`, with its head. Empty after a failure."""
    answer = b""
    try:
        with _open(address) as connection:
            connection.settimeout(TIMEOUT_S)
            head = f"GET {path} HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())
            while len(answer) < max_bytes and (part := connection.recv(max_bytes)):
                answer += part
    except OSError:
        return b""
    return answer


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
