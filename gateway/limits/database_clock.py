"""Gives a gateway the database's time. Windows of limits, lifetimes of keys and times of usage are
computed from it, so that all gateways agree."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

log = logging.getLogger(__name__)

MAX_DIFFERENCE_S = 5.0
"""Difference in seconds between this machine's clock and the database's clock above which a warning
is logged."""


class DatabaseClock:
    """Clock that returns the database's time without a query, by computing it from the results of
    earlier queries.

    The database reads its clock after a query was sent and before the answer arrives, so each
    exchange gives an upper and a lower bound of the database's time. Before the first exchange,
    this machine's clock is used. After it, changes of this machine's clock have no effect.
    """

    def __init__(self, machine: Callable[[], float] = time.time) -> None:
        """`machine` returns this machine's time in seconds since 1970."""
        self._machine = machine
        self._offset_s = machine() - time.monotonic()
        """Database's time minus time.monotonic(), in seconds."""
        self._differs = False

    def __call__(self) -> float:
        """Returns the database's time in seconds since 1970."""
        return time.monotonic() + self._offset_s

    @property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self(), UTC)

    @property
    def difference_s(self) -> float:
        """Seconds by which this machine's clock is ahead of the database's. Negative if it is
        behind."""
        return self._machine() - self()

    def note_exchange(self, sent_at: float, database_at: float, received_at: float) -> None:
        """Corrects the clock with the result of a query that read the database's time.
        `database_at` is the result in seconds since 1970. `sent_at` and `received_at` are the
        values of time.monotonic() before and after the query."""
        latest, earliest = database_at - sent_at, database_at - received_at
        self._offset_s = min(max(self._offset_s, earliest), latest)
        differs = abs(self.difference_s) > MAX_DIFFERENCE_S
        if differs != self._differs:
            self._differs = differs
            self._report()

    def _report(self) -> None:
        if not self._differs:
            log.info("this machine's clock agrees with the database's again")
            return
        ahead_s = self.difference_s
        log.warning(
            "this machine's clock is %.1f s %s the database's, which limits and keys follow",
            *(abs(ahead_s), "ahead of" if ahead_s > 0 else "behind"),
        )
