"""Rejects request headers that a proxy may read differently than this server, so that a proxy's
checks cannot be bypassed."""

from __future__ import annotations

import re
from collections.abc import Iterable

AT_MOST_ONCE = frozenset(
    (
        *(b"host", b"authorization", b"x-api-key"),
        *(b"content-type", b"idempotency-key", b"x-request-timeout"),
    )
)
"""Headers that may occur only once."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""Syntax of https://www.rfc-editor.org/rfc/rfc9110#name-host-and-authority"""


def find_ambiguous_header(headers: Iterable[tuple[bytes, bytes]], version: str) -> str | None:
    """Returns why a proxy may read the headers differently than this server. Returns None if it
    cannot.

    `headers` have names in lower case. `version` is the HTTP version.
    """
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in AT_MOST_ONCE:
            if name in seen:
                return f"there is more than one '{name.decode()}'"
            seen[name] = value
    host = seen.get(b"host")
    if host is None and version != "1.0":
        return "there is no 'host'"
    if host is not None and not _HOST.fullmatch(host):
        return "'host' is not a name or address with a port"
    key, authorization = seen.get(b"x-api-key"), seen.get(b"authorization")
    if key is not None and authorization is not None:
        scheme, _, text = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or text.strip() != key.strip():
            return "'x-api-key' and 'authorization' differ"
    return None
