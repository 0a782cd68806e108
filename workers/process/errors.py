"""Errors of a configuration that a worker cannot run."""

from __future__ import annotations


class CannotServe(ValueError):
    """Configuration that can never run on this machine. The message says why."""


class CannotServeModel(CannotServe):
    """Model that this worker's configuration cannot serve. The message does not name it."""
