"""Text that others wrote, such as names in files and messages of a server, as a terminal gets it:
it is read, and never acted on."""

from __future__ import annotations

import io
import re
from typing import IO, Any

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except for newline and tab, characters that change the direction or begin a
line, and halves of surrogate pairs."""


def neutral(text: str) -> str:
    """Returns the text with each character that a terminal would act on spelled as JSON spells it,
    such as `\\u001b`. JSON therefore stays JSON."""
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class NeutralText(io.TextIOWrapper):
    """Standard output or standard error of a command, on which all text is neutral."""

    def write(self, text: str, /) -> int:
        super().write(neutral(text))
        return len(text)

    def write_exactly(self, text: str) -> int:
        """Writes text of our own that moves the cursor or has colours, or what a file is to have
        as it is."""
        return super().write(text)


class ExactText:
    """File whose text reaches a NeutralText as it is, and another file as ever."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        if isinstance(self._file, NeutralText):
            return self._file.write_exactly(text)
        return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
