"""Adapters that could not be loaded: not tried again for a while, and remembered longer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping

from adapters.errors import AdapterUnavailable
from adapters.pool.tiers import AdapterEntry

RETRY_S = 5.0
"""Between two tries."""
MAX_FAULTS = 256
"""Adapters whose last failure is remembered; they may be long forgotten otherwise."""


class Failures:
    """Holds `AdapterEntry.failure`, and what is told of adapters until a load succeeds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[AdapterEntry] = deque()
        """In the order in which they may be tried again."""
        self._faults: OrderedDict[str, AdapterUnavailable] = OrderedDict()

    @property
    def faults(self) -> Mapping[str, AdapterUnavailable]:
        """The last failure by digest."""
        return self._faults

    def note(self, entry: AdapterEntry, error: BaseException) -> None:
        # Never the one that was raised: its frames hold the files, the image.
        if isinstance(error, AdapterUnavailable):
            error = AdapterUnavailable(error.code, str(error))
        else:
            error = AdapterUnavailable("adapter.load_failed", f"{type(error).__name__}: {error}")
        entry.failure = (error, self._clock() + RETRY_S)
        self._recent.append(entry)
        self._faults[entry.digest] = error
        self._faults.move_to_end(entry.digest)
        if len(self._faults) > MAX_FAULTS:
            self._faults.popitem(last=False)

    def note_success(self, entry: AdapterEntry) -> None:
        self._faults.pop(entry.digest, None)

    def recent(self, entry: AdapterEntry) -> AdapterUnavailable | None:
        """Why it is not yet to be tried again."""
        if entry.failure is not None and self._clock() >= entry.failure[1]:
            entry.failure = None
        return None if entry.failure is None else entry.failure[0]

    def over(self) -> Iterator[AdapterEntry]:
        """Those that may be tried again, each once."""
        while self._recent and self.recent(self._recent[0]) is None:
            yield self._recent.popleft()
