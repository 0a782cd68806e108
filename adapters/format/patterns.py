"""Matching of untrusted regular expressions with Python's own engine, as in peft. Torch-free.

Python's engine backtracks, so a short pattern can take hours. `cpu_limit` bounds the time, and
untrusted patterns are matched only in processes with resource limits (see `sandbox/`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from adapters.errors import AdapterRejected

MAX_PATTERN_LENGTH = 2048
CPU_S = 2.0
"""Maximum seconds of CPU time to match all patterns of an adapter in a sandbox."""


class _OutOfTime(Exception):
    """Raised when the CPU time is used up. This exception ends all matching, whereas an
    AdapterRejected ends only the matching with one base model."""


@contextmanager
def cpu_limit(seconds: float | None) -> Iterator[None]:
    """Context manager that raises AdapterRejected as soon as its block has used `seconds` seconds
    of CPU time, even during a match.

    Works only in the main thread of a process. If `seconds` is None, there is no limit.
    """
    if seconds is None:
        yield
        return

    def give_up(*_: object) -> NoReturn:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _OutOfTime:
        raise AdapterRejected(
            "adapter.config.pattern_too_complex", "target_modules", f"over {seconds} s to match"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class PatternMatcher:
    """Matches patterns against module names.

    All methods raise AdapterRejected(adapter.config.pattern*) for a pattern that is invalid or too
    long. field: config key that contains the patterns. The errors name the key.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._compiled: dict[str, re.Pattern[str]] = {}

    def fullmatch(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches the whole text."""
        return self._compile(pattern).fullmatch(text) is not None

    def match(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches a prefix of `text`."""
        return self._compile(pattern).match(text) is not None

    def ends_with(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches whole dotted parts at the end of the text."""
        return self._compile(rf"(.*\.)?({pattern})$").match(text) is not None

    def _compile(self, pattern: str) -> re.Pattern[str]:
        if pattern not in self._compiled:
            if len(pattern) > MAX_PATTERN_LENGTH:
                self._refuse("adapter.config.pattern_too_complex", f"{len(pattern)} characters")
            try:
                self._compiled[pattern] = re.compile(pattern)
            except (re.error, OverflowError) as error:
                self._refuse("adapter.config.pattern", f"{pattern[:80]}: {error}")
            except RecursionError:
                self._refuse("adapter.config.pattern_too_complex", pattern[:80])
        return self._compiled[pattern]

    def _refuse(self, code: str, got: object) -> NoReturn:
        raise AdapterRejected(code, self._field, got)
