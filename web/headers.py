"""Headers of a request as the server has parsed them."""

from __future__ import annotations

from litestar.types import Scope


def find_header(scope: Scope, name: bytes) -> str | None:
    """Returns the value of the first header of this name (in lower case). Returns None if there is
    none. An index of all headers would be slower for the one or two that are looked up."""
    for given, value in scope["headers"]:
        if given == name:
            return value.decode("latin-1")
    return None


def find_headers(scope: Scope, name: bytes) -> list[str]:
    """Returns the values of all headers of this name, in lower case, in their order."""
    return [value.decode("latin-1") for given, value in scope["headers"] if given == name]


def announced_bytes(scope: Scope) -> int:
    """Returns the body's length, which the server has checked to be a number. Returns 0 for a body
    in chunks."""
    return int(find_header(scope, b"content-length") or 0)
