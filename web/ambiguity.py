"""Rejects requests whose path or headers a proxy may read differently than this server, so that a
proxy's checks cannot be bypassed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

MODELS = b"/v1/models/"
"""Path below which a slash may be percent-encoded, because official clients encode model names."""
KEY_PREFIX = b"lpx_"
"""Beginning of every key. A value of `x-api-key` without it, such as a client's key of another
server, is ignored if there is an `authorization` header."""

_PLAIN = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+)*/?\Z")
"""Matches paths whose segments have the form of RFC 3986, without percent-encoding and without
empty, `.` or `..` segments."""
_CHARACTER = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2}")
_NEEDLESS = re.compile(rb"%(?:[46][1-9A-Fa-f]|[57][0-9Aa]|3[0-9]|2[DdEe]|5[Ff]|7[Ee])")
"""Matches needless percent-encoding of a letter, a digit, or one of `-._~`."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")

AT_MOST_ONCE = frozenset(
    (
        *(b"host", b"authorization", b"x-api-key"),
        *(b"content-type", b"idempotency-key", b"x-request-timeout"),
    )
)
"""Headers that may occur only once."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""Matches a valid Host header (https://www.rfc-editor.org/rfc/rfc9110#name-host-and-authority)."""


def find_ambiguous_path(raw_path: bytes) -> str | None:
    """Returns the reason why a proxy may read the path differently than this server. Returns None
    if there is no such reason.

    `raw_path` is the path as it was sent, without the query.
    """
    if _PLAIN.match(raw_path):
        return None
    if b"\\" in raw_path:
        return "it has a backslash"
    if _CHARACTER.sub(b"", raw_path):
        return "it has a character that must be percent-encoded, or half of a percent-encoded one"
    if _NEEDLESS.search(raw_path):
        return "it percent-encodes a letter, a digit or one of '-._~'"
    if b"%2f" in raw_path.lower() and not raw_path.startswith(MODELS):
        return "it percent-encodes a slash"
    return _find_in_decoded(unquote_to_bytes(raw_path))


def _find_in_decoded(path: bytes) -> str | None:
    if _CONTROL.search(path) or b"\\" in path or b"%" in path:
        return "it percent-encodes a control character, a backslash or a percent sign"
    if not path.startswith(b"/") or b"//" in path:
        return "it has an empty segment"
    if {b".", b".."} & set(path.split(b"/")):
        return "it has a segment '.' or '..'"
    try:
        path.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    return None


def find_ambiguous_header(headers: Iterable[tuple[bytes, bytes]], version: str) -> str | None:
    """Returns the reason why a proxy may read the headers differently than this server. Returns
    None if there is no such reason.

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
    if key is not None and authorization is not None and key.strip().startswith(KEY_PREFIX):
        scheme, _, text = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or text.strip() != key.strip():
            return "'x-api-key' and 'authorization' have two keys"
    return None
