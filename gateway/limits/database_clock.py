"""The database's clock as a gateway knows it. Windows of limits, lifetimes of keys and times of
usage go by it, so that all gateways agree on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

log = logging.getLogger(__name__)

MAX_DIFFERENCE_S = 5.0
"""Seconds between this machine's clock and the database's above which a log line says so."""


class DatabaseClock:
    """Tells the database's time without a query, from the last exchange with it.

    An exchange bounds it: what the database read as its time was read after the query was sent and
    before the answer came. Until the first one this machine's clock is believed, and afterwards it
    may be set as one likes.
    """

    def __init__(self, machine: Callable[[], float] = time.time) -> None:
        """machine: this machine's clock, in seconds since 1970."""
        self._machine = machine
        self._offset_s = machine() - time.monotonic()
        """Database's time less that of time.monotonic()."""
        self._differs = False

    def __call__(self) -> float:
        """Returns the seconds since 1970."""
        return time.monotonic() + self._offset_s

    @property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self(), UTC)

    @property
    def difference_s(self) -> float:
        """Seconds that this machine's clock is ahead of the database's."""
        return self._machine() - self()

    def note_exchange(self, sent_at: float, database_at: float, received_at: float) -> None:
        """Takes the time that the database told. sent_at, received_at: of time.monotonic()."""
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
            "this machine's clock is %.1f s %s the database's, by which limits and keys go",
            *(abs(ahead_s), "ahead of" if ahead_s > 0 else "behind"),
        )
