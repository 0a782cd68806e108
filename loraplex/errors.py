"""Errors that the command line reports in one line, without a traceback."""

from __future__ import annotations

import json
import os
import re
import ssl
from typing import Any

_NUMBERS = re.compile(r"\[(?:Errno -?\d+|SSL(?:: \w+)?)\] | \(_ssl\.c:\d+\)")
"""Matches error numbers, and places in C source files, in the messages of Python's exceptions."""


def reason_of(error: Exception) -> str:
    """Returns the cause of an error in words, without its number."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return _NUMBERS.sub("", str(error))


class LoraplexError(Exception):
    """Error with a message for people and an `exit_code` for scripts."""

    exit_code = 1


class BadSettings(LoraplexError):
    """Invalid setting. The message names the setting and its source."""

    exit_code = 2


class OutputLost(LoraplexError):
    """Failed write to standard output. Has no message if the reader has closed the pipe."""


class ApiFailure(LoraplexError):
    """Refusal of the server, or failure to reach it."""


class NoAnswer(ApiFailure):
    """Failed call to a server that is unreachable or temporarily unavailable. A retry may help."""


class NoKey(ApiFailure):
    """Missing key for the server or the tenant."""


class Refused(ApiFailure):
    """Refusal by the server. `error` has a message and a code. For a rejected adapter, it also has
    field, got, allowed and hint. `status` is the answer's HTTP status, or 0 if the refusal was
    reported later."""

    def __init__(self, error: dict[str, Any], status: int = 0) -> None:
        self.status = status
        self.code = str(error.get("code") or "")
        super().__init__(_sentence_of(error))


def _sentence_of(error: dict[str, Any]) -> str:
    """Returns the message of an error. For a rejected adapter, lists what cannot be served."""
    if "field" not in error:
        return str(error.get("message") or error.get("code") or error)
    lines = [f"the adapter cannot be served ({error['code']})", f"  field    {error['field']}"]
    for name in ("got", "allowed"):
        if (value := error.get(name)) is not None:
            lines.append(f"  {name:<8} {value if isinstance(value, str) else json.dumps(value)}")
    if error.get("hint"):
        lines.append(f"  hint     {error['hint']}")
    return "\n".join(lines)


class ImportFailed(LoraplexError):
    """Failed import of a model. The message says why the source cannot be imported."""


class NotInstalled(LoraplexError):
    """Missing package, such as torch or the demo's model. The message says how to install it."""


class PostgresError(LoraplexError):
    """Failure to create, start or stop the embedded PostgreSQL. The message says what to do."""


class NotPrivate(LoraplexError):
    """File or folder that another account could read or replace."""


class AdminKeyExists(LoraplexError):
    """Refusal to create a first admin key, because a valid one exists."""


class ChildFailed(LoraplexError):
    """Process that ended before it was ready. Its output is shown above the message."""
