"""Reads the client's `tracestate` header for spans."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opentelemetry.trace import TraceState

MAX_CHARS = 512
"""Maximum length of the header. It is the length up to which W3C asks that headers are passed on.
Longer headers are dropped."""
MAX_MEMBERS = 32

_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
"""https://www.w3.org/TR/trace-context/#tracestate-header"""
_MULTI_TENANT = re.compile(r"[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}")


def read_trace_state(headers: Sequence[str]) -> TraceState:
    """Returns the contents of a request's `tracestate` headers. Returns an empty state if they are
    too long or invalid. The contents are never logged."""
    joined = ",".join(headers)
    members = [each.strip(" \t") for each in joined.split(",")]
    found = [_MEMBER.fullmatch(each) for each in members if each]
    entries = [(each[1], each[2]) for each in found if each is not None]
    keys = {key for key, _ in entries}
    is_valid = (
        len(joined) <= MAX_CHARS
        and len(found) <= MAX_MEMBERS
        and len(keys) == len(found)
        and all("@" not in key or _MULTI_TENANT.fullmatch(key) for key in keys)
    )
    return TraceState(entries if is_valid else [])
