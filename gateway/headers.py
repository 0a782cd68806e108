"""A request's headers as the server has read them."""

from __future__ import annotations

from litestar.types import Scope


def find_header(scope: Scope, name: bytes) -> str | None:
    """The first of this name, in lower case. For one or two, an index of all costs more."""
    for given, value in scope["headers"]:
        if given == name:
            return value.decode("latin-1")
    return None


def find_headers(scope: Scope, name: bytes) -> list[str]:
    """Returns the values of all headers of this name, in lower case, in their order."""
    return [value.decode("latin-1") for given, value in scope["headers"] if given == name]


def announced_bytes(scope: Scope) -> int:
    """Length of the request's body, which the server has checked to be a number; 0 of a body that
    comes in chunks."""
    return int(find_header(scope, b"content-length") or 0)
