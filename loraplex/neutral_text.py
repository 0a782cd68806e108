"""Makes foreign texts, such as file names and a server's messages, harmless for a terminal."""

from __future__ import annotations

import io
import re
from typing import IO, Any

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters except newline and tab, characters that change the writing direction
or begin a new line, and lone surrogates."""


def neutral(text: str) -> str:
    """Returns the text with each character on which a terminal would act escaped as in JSON, such
    as `\\u001b`. JSON stays valid."""
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class NeutralText(io.TextIOWrapper):
    """Standard output or standard error that makes all texts harmless for a terminal."""

    def write(self, text: str, /) -> int:
        super().write(neutral(text))
        return len(text)

    def write_exactly(self, text: str) -> int:
        """Writes text unchanged: this program's own control sequences, or the content of a file."""
        return super().write(text)


class ExactText:
    """Wrapper of a file to which text is written unchanged, even if the file is a NeutralText."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        if isinstance(self._file, NeutralText):
            return self._file.write_exactly(text)
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
