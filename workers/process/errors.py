"""Errors of a configuration that a worker cannot run."""

from __future__ import annotations


class CannotServe(ValueError):
    """Raised for a configuration that can never run on this machine. The message says why."""


class CannotServeModel(CannotServe):
    """Raised for a model that this worker's configuration cannot serve. The message does not
    contain the model's name."""
