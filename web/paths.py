"""Rejects ambiguous paths, so that a proxy's path filters and this server read every path alike."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

MODELS = b"/v1/models/"
"""Below this path, a slash in a model's name may be percent-encoded, because the official clients
encode it."""

MESSAGES = "/v1/messages"
"""Anthropic's route. Other routes of Anthropic's API are below it."""

_PLAIN = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+)*/?\Z")
"""Matches paths whose segments have the form of RFC 3986, without percent-encoding and without
empty, `.` or `..` segments."""
_CHARACTER = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2}")
_NEEDLESS = re.compile(rb"%(?:[46][1-9A-Fa-f]|[57][0-9Aa]|3[0-9]|2[DdEe]|5[Ff]|7[Ee])")
"""Matches the percent-encoding of a letter, a digit, or one of `-._~`, none of which needs it."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


def is_of_messages(path: str) -> bool:
    """Returns whether a path belongs to Anthropic's Messages API, whose answers have Anthropic's
    format."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def find_ambiguity(raw_path: bytes) -> str | None:
    """Returns why a filter may read the path differently than this server. Returns None if it
    cannot.

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
