"""The one error of this package that is not an answer.

    AssertionError
        IntegrityError    the accounting contradicts itself: a defect of ours, never of a request

Running out of memory is no error: the allocating calls answer None or False.
"""

from __future__ import annotations


class IntegrityError(AssertionError):
    """Pages, extents or runs are not in exactly one state each. The message has the numbers."""


def require(condition: bool, message: str) -> None:
    """Raises IntegrityError with the message unless the condition holds."""
    if not condition:
        raise IntegrityError(message)
