"""Counts refusals, and logs them at a rate that a flood of requests cannot increase."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from web.error_answers import REFUSAL
from web.request_head import address_prefix, client_address

INTERVAL_S = 10.0
"""Seconds between two log lines for the same reason and address prefix."""
MAX_SERIES = 256
"""Maximum number of pairs of reason and address prefix with log lines of their own. All further
prefixes share one log line for each reason."""
MANY = "many"
"""Name in a log line that stands for all address prefixes without log lines of their own."""
LOGGED = frozenset({401, 403, 429})
"""Statuses that are logged, because attacks cause them. Other statuses are only counted."""
log = logging.getLogger(__name__)


class RefusalMetrics(Protocol):
    """Counters of refusals."""

    def add_answer(self, scope: Mapping[str, Any], status: int, reason: str) -> None:
        """Counts an answer with status 400 or more."""
        ...

    def add_connection(self, reason: str) -> None:
        """Counts a connection that was closed because of a limit of the server."""
        ...


class Refusals:
    """Log of refusals. Logs the first refusal of each pair of reason and address prefix, then the
    number of refusals in each interval."""

    def __init__(
        self, metrics: RefusalMetrics | None = None, interval_s: float = INTERVAL_S
    ) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._suppressed: dict[tuple[str, str], int] = {}

    def note_answer(self, scope: Mapping[str, Any], status: int) -> None:
        """Records an answer with status 400 or more."""
        state = scope["state"]
        reason = state.get(REFUSAL) or str(status)
        if self._metrics is not None:
            self._metrics.add_answer(scope, status, reason)
        if status in LOGGED:
            self._log("refused", reason, client_address(scope), state.get("request_id"))

    def note_connection(self, reason: str, address: str | None) -> None:
        """Records a connection that was closed because of a limit of the server."""
        if self._metrics is not None:
            self._metrics.add_connection(reason)
        self._log("connection closed", reason, address, None)

    def _log(self, message: str, reason: str, address: str | None, request_id: str | None) -> None:
        series = (reason, address_prefix(address))
        if series not in self._suppressed and len(self._suppressed) >= MAX_SERIES:
            series = (reason, MANY)
        if series in self._suppressed:
            self._suppressed[series] += 1
            return
        self._suppressed[series] = 0
        about = {"reason": reason, "address": address or series[1]}
        log.warning(message, extra=about | ({"request_id": request_id} if request_id else {}))
        asyncio.get_running_loop().call_later(self._interval_s, self._tell, message, series)

    def _tell(self, message: str, series: tuple[str, str]) -> None:
        """Logs a series' number of refusals since its last line. Ends the series if it is 0."""
        number = self._suppressed.pop(series)
        if number == 0:
            return
        self._suppressed[series] = 0
        reason, prefix = series
        about = {"reason": reason, "address": prefix, "number": number}
        log.warning(f"{message} again", extra=about)
        asyncio.get_running_loop().call_later(self._interval_s, self._tell, message, series)
