"""Remembers the last failure of each error code that clients did not cause."""

from __future__ import annotations

import time

from store.gateway_load import LastError

MAX_CODES = 16


class LastErrors:
    """Last failure of each error code, for at most `MAX_CODES` codes. Used only on the event
    loop."""

    def __init__(self) -> None:
        self._by_code: dict[str, LastError] = {}
        """Last failures by code, the newest one at the end."""

    def note(self, code: str, request_id: str) -> None:
        earlier = self._by_code.pop(code, None)
        number = 1 + (earlier.number if earlier else 0)
        self._by_code[code] = LastError(code, time.time(), request_id, number)
        if len(self._by_code) > MAX_CODES:
            del self._by_code[next(iter(self._by_code))]

    def newest_first(self) -> list[LastError]:
        return list(self._by_code.values())[::-1]
