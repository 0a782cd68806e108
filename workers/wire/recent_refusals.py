"""Cache of recent refusals, so that a grammar that was refused is refused again without another
compilation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

REMEMBERED_S = 60.0
MAX_REMEMBERED = 4096

R = TypeVar("R")


class RecentRefusals(Generic[R]):
    """Cache of the reasons of recent refusals, by digest of the refused object. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._reasons: OrderedDict[bytes, tuple[float, R]] = OrderedDict()
        """Time and reason of each refusal by digest of the refused object, the oldest first."""

    def find(self, key: bytes) -> R | None:
        """Returns the reason why the object was refused in the last minute, or None if it was not
        refused. key: digest of the object."""
        with self._lock:
            found = self._reasons.get(key)
        if found is None or self._clock() - found[0] >= REMEMBERED_S:
            return None
        return found[1]

    def remember(self, key: bytes, reason: R) -> None:
        with self._lock:
            self._reasons[key] = self._clock(), reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > MAX_REMEMBERED:
                self._reasons.popitem(last=False)
