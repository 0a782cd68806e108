"""Errors of the memory package, all of which are bugs. If memory is short, the allocating methods
return None or False."""

from __future__ import annotations

import traceback


class IntegrityError(AssertionError):
    """Failed integrity check: a page, extent or allocation is not in exactly one state."""


def require(condition: bool, message: str) -> None:
    """Raises IntegrityError with the message unless the condition holds."""
    if not condition:
        raise IntegrityError(message)


def release_frames(error: BaseException | None) -> None:
    """Clears the local variables of the frames in the tracebacks of the error and its causes, so
    that the error does not keep large objects alive. The tracebacks can still be printed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
