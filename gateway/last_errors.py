"""Last failures of a gateway that its clients did not cause, one for each code."""

from __future__ import annotations

import time

from store.gateway_load import LastError

MAX_CODES = 16


class LastErrors:
    """Last failure of each code. Used only on the event loop."""

    def __init__(self) -> None:
        self._by_code: dict[str, LastError] = {}
        """Newest last."""

    def note(self, code: str, request_id: str) -> None:
        earlier = self._by_code.pop(code, None)
        number = 1 + (earlier.number if earlier else 0)
        self._by_code[code] = LastError(code, time.time(), request_id, number)
        if len(self._by_code) > MAX_CODES:
            del self._by_code[next(iter(self._by_code))]

    def newest_first(self) -> list[LastError]:
        return list(self._by_code.values())[::-1]
