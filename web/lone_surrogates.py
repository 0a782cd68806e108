"""Replaces halves of surrogate pairs in JSON. Clients send them when they cut a text in the middle
of a character outside the Basic Multilingual Plane, such as an emoji."""

from __future__ import annotations

import re

_LONE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
"""Matches an escape of half a pair, in text without escaped backslashes."""
_NUL = b"\0\0"


def replace_lone_surrogates(text: bytes) -> bytes:
    """Returns JSON text with U+FFFD in place of each escape of a lone surrogate. Returns the same
    object if there is none. Takes one pass over the text for each kind of replacement."""
    # A NUL byte is not valid in JSON, so it can mark the escaped backslashes. Without them, each
    # backslash begins an escape.
    if b"\\u" not in text or b"\0" in text:
        return text
    replaced, number = _LONE.subn(rb"\\ufffd", text.replace(b"\\\\", _NUL))
    return replaced.replace(_NUL, b"\\\\") if number else text
