"""Failures the command line tells in a line rather than a traceback."""

from __future__ import annotations

import json
from typing import Any


class LoraplexError(Exception):
    """The message is for people; `exit_code` for scripts."""

    exit_code = 1


class BadSettings(LoraplexError):
    """A setting has no sense; the message names it and where it came from."""

    exit_code = 2


class OutputLost(LoraplexError):
    """Standard output cannot be written. No message: its reader has enough."""


class ApiFailure(LoraplexError):
    """The server refused, or is not there."""


class NoAnswer(ApiFailure):
    """The server is not there, or not now: asking again may help."""


class NoKey(ApiFailure):
    """The command line has no key for the server, or none of the tenant."""


class Refused(ApiFailure):
    """The server said no. `error` is its object: a message and a code, of a refused adapter also
    field, got, allowed and hint. `status` is that of the answer, 0 for what came later."""

    def __init__(self, error: dict[str, Any], status: int = 0) -> None:
        self.status = status
        self.code = str(error.get("code") or "")
        super().__init__(_tell(error))


def _tell(error: dict[str, Any]) -> str:
    """The message, or what was found where a refused adapter has what cannot be served."""
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
    """The source cannot be imported; the message names what was found."""


class TorchMissing(LoraplexError):
    """A worker is to run where torch is not installed; the message is what installs it."""


class DemoMissing(LoraplexError):
    """The package with the demo's model is not installed; the message is what installs it."""


class PostgresError(LoraplexError):
    """The embedded server cannot be set up, started or stopped; the message says what to do."""


class NotPrivate(LoraplexError):
    """Another account could read or replace what is kept there."""


class AdminKeyExists(LoraplexError):
    """A first admin key is not made where one is live already."""


class ChildFailed(LoraplexError):
    """A process ended before it was ready; what it said is in the output above."""
