"""A stream of bytes, whatever it comes from."""

from __future__ import annotations

from typing import Protocol


class Readable(Protocol):
    """A file, or the body of an object in a bucket."""

    def read(self, size: int = -1, /) -> bytes: ...
