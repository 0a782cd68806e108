"""Progress reports of long operations."""

from __future__ import annotations

from collections.abc import Callable

ByteProgress = Callable[[int, int], None]
"""Function that receives the number of bytes done and the total number of bytes. At the end, both
numbers are equal."""


class ProgressMeter:
    """Counter of processed bytes. Reports each increase to `progress`."""

    def __init__(self, total: int, progress: ByteProgress | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def add(self, num_bytes: int) -> None:
        self._done = min(self._total, self._done + num_bytes)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        self.add(self._total - self._done)
