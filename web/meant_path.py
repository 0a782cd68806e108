"""Guesses which route a client with a wrong base URL meant."""

from __future__ import annotations

from collections.abc import Container

DOCUMENTS = {
    "/openapi.json": "/schema",
    "/swagger": "/docs",
    "/swagger-ui": "/docs",
    "/redoc": "/docs",
    "/api": "/docs",
}
PREFIXES = ("/openai", "/api", "/anthropic")
"""Prefixes that other servers put before /v1."""


def find_meant_path(path: str, served: Container[str]) -> str | None:
    """Returns the route that a client probably meant by a path that is not served. Returns None if
    there is no such route.

    The client's base URL may lack /v1, have it twice, end with a whole route, or have another
    server's prefix.
    """
    path = path.rstrip("/")
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    candidates = [path, *(path.removeprefix(each) for each in PREFIXES if path.startswith(each))]
    for candidate in candidates:
        while candidate.startswith("/v1/v1/"):
            candidate = candidate.removeprefix("/v1")
        for spelling in (candidate, f"/v1{candidate}", *_endings(candidate)):
            if spelling in served:
                return spelling
    return None


def _endings(path: str) -> list[str]:
    """Returns routes made of the last one or two segments of a path, for clients whose base URL
    already ends with a route, as in /v1/messages/v1/messages."""
    endings: list[str] = []
    steps = path.split("/")
    for count in (2, 1):
        ending = "/".join(steps[-count:])
        endings += [f"/v1/{ending}", f"/{ending}"] if len(steps) > count else []
    return endings
