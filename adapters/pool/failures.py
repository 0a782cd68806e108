"""Failed loads of adapters: not retried for a while, and reported for longer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping

from adapters.errors import AdapterUnavailable
from adapters.pool.tiers import AdapterEntry

RETRY_S = 5.0
"""Seconds between two tries."""
MAX_FAULTS = 256
"""Maximum number of remembered failures. They may outlive the adapters' entries."""


class Failures:
    """Owner of `AdapterEntry.failure`, and of the failures reported until a load succeeds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[AdapterEntry] = deque()
        """Entries in the order in which they may be retried."""
        self._faults: OrderedDict[str, AdapterUnavailable] = OrderedDict()

    @property
    def faults(self) -> Mapping[str, AdapterUnavailable]:
        """Last failure of each adapter, by digest."""
        return self._faults

    def note(self, entry: AdapterEntry, error: BaseException) -> None:
        # A new error, because the frames of the raised one would keep the files and the image
        # alive.
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
        """Returns the error if the adapter must not be retried yet, else None."""
        if entry.failure is not None and self._clock() >= entry.failure[1]:
            entry.failure = None
        return None if entry.failure is None else entry.failure[0]

    def over(self) -> Iterator[AdapterEntry]:
        """Yields each entry that may be retried, once."""
        while self._recent and self.recent(self._recent[0]) is None:
            yield self._recent.popleft()
