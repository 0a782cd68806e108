"""Failures the command line tells in a line rather than a traceback."""

from __future__ import annotations


class LoraplexError(Exception):
    """The message is for people; `exit_code` for scripts."""

    exit_code = 1


class BadSettings(LoraplexError):
    """A setting has no sense; the message names it and where it came from."""

    exit_code = 2


class ApiFailure(LoraplexError):
    """The server refused, or is not there."""


class ImportFailed(LoraplexError):
    """The source cannot be imported; the message names what was found."""


class DemoMissing(LoraplexError):
    """The package with the demo's model is not installed; the message is what installs it."""


class PostgresError(LoraplexError):
    """The embedded server cannot be set up, started or stopped; the message says what to do."""


class NotPrivate(LoraplexError):
    """Somebody else could read or replace what is kept there."""


class ChildFailed(LoraplexError):
    """A process ended before it was ready; what it said is in the output above."""
