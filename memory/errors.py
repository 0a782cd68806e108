"""Errors of the memory package.

    AssertionError
        IntegrityError    inconsistent accounting: a bug in this package, never a bad request

Running out of memory is not an error: the allocating methods return None or False.
"""

from __future__ import annotations


class IntegrityError(AssertionError):
    """Failed integrity check: a page, extent or allocation is not in exactly one state."""


def require(condition: bool, message: str) -> None:
    """Raises IntegrityError with the message unless the condition holds."""
    if not condition:
        raise IntegrityError(message)
